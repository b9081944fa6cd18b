"""Where the results of a recipe go: folders that are named by all that the results depend on."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from harp import models
from harp.data import registry
from harp.errors import DiskError, RecipeError
from harp.experiments.recipe import Recipe
from harp.system import files


def contents(recipe: Recipe, source: registry.DataSet) -> list[str]:
    """What a recipe's results depend on beside its text: hashes of the data and of the files it reads."""
    read = [recipe.model.weights, models.source_file(recipe.model.name)]
    return [source.fingerprint(), *(_hash(Path(file)) for file in read if file is not None)]


def computed_in(contents: Sequence[str], precision: str) -> list[str]:
    """The same with the precision that it is computed in, which a recipe may leave to the machine."""
    return list(contents) if precision == "32-true" else [*contents, precision]


def name(recipe: Recipe, contents: Sequence[str]) -> str:
    """The name of the folder that a run's outcome goes to."""
    return f"{recipe.name}-{recipe.identity(len(recipe.stages), *contents)}"


def _hash(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make(path: Path) -> None:
    """Make a folder and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"can't make the folder {path}: {error.strerror}", full=files.full(error)) from error


def check_writable(root: Path, needed: int) -> None:
    """Refuse an output folder that can't take the results before hours of work, without leaving anything in it."""
    there = files.existing(root)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise RecipeError(f"can't write to the output folder {root}: {there} is not a writable folder")
    free = shutil.disk_usage(there).free
    if free < needed:
        room = f"has {files.amount(free)} free, this run needs {files.amount(needed)}"
        raise RecipeError(f"the output folder {root} {room}")
