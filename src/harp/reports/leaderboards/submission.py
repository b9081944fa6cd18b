"""A prepared submission: a folder that appears whole or not at all, and the problems with it, one line each."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harp.errors import CheckpointError, RecipeError
from harp.experiments.run_folder import Finished
from harp.pruning.methods import PRUNERS
from harp.pruning.papers import Paper
from harp.system.files import reason

ERROR, WARNING = "error: ", "warning: "


@dataclass(frozen=True)
class Submission:
    """A prepared folder; errors keep it from being submitted, warnings weaken it."""

    folder: Path
    problems: tuple[str, ...]

    @property
    def errors(self) -> list[str]:
        """What keeps it from being submitted."""
        return [line.removeprefix(ERROR) for line in self.problems if line.startswith(ERROR)]

    @property
    def warnings(self) -> list[str]:
        """What weakens it."""
        return [line.removeprefix(WARNING) for line in self.problems if line.startswith(WARNING)]


def paper_of(run: Finished, wanted: str) -> Paper:
    """The paper of the run's method, for something that the caller did not give."""
    name = run.pruning.pruner["name"] if run.pruning else "dense"
    paper = PRUNERS[name].paper
    if paper is None:
        raise RecipeError(f"{run.folder}: the method {name!r} has no paper, so give the {wanted} yourself")
    return paper


def check_free(out: Path) -> None:
    """Refuse a folder that has content: nothing is ever overwritten."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"{out} exists already: give a new folder, or empty it first")


@contextmanager
def fresh(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` when the block ends well, and is removed when it doesn't."""
    check_free(out)
    draft = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        try:
            yield draft
            if out.exists():
                out.rmdir()
            draft.rename(out)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"can't write {out}: {reason(error)}") from error


def read_json(path: Path) -> Any:
    """The content of a file of a submission."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read {path.name}: {reason(error)}") from error


def checked(folder: Path, problems: Callable[[Path], list[str]]) -> list[str]:
    """The problems with a folder, or the reason why they can't be found."""
    try:
        return problems(folder)
    except CheckpointError as error:
        return [f"{ERROR}{error}"]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        return [f"{ERROR}{folder} is not a submission of ours, or damaged: {reason(error)}"]
