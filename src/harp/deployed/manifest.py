"""What is known of an artefact beside what it computes: its manifest, and the run that it came from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harp import recipe
from harp.deployed.opening import Artefact
from harp.errors import CheckpointError
from harp.files import reason
from harp.recipe import Recipe

FILE = "manifest.json"
_LARGEST = 1 << 24  # bytes of a manifest


@dataclass(frozen=True)
class Origin:
    """Where an artefact comes from, as far as anybody says it."""

    told: Mapping[str, Any]  # the manifest's content
    run: Path | None  # the folder of the run, if it is at hand
    unlisted: bool = False  # whether there is a manifest beside the file that lists others only

    @property
    def recipe(self) -> Recipe | None:
        """The run's recipe."""
        return None if self.run is None else recipe.load(self.run / "recipe.yaml")

    @property
    def data(self) -> str | None:
        """The name of the data set that it was made for, by the run, else by the manifest's numbers."""
        made = self.recipe
        if made is not None:
            return made.data.name
        named = [self.told.get("data"), *(each.get("data") for each in self.accuracies)]
        return next((each for each in named if isinstance(each, str) and each), None)

    @property
    def accuracies(self) -> list[Mapping[str, Any]]:
        """The numbers that were stated for it: by the run, else by the manifest."""
        told = self.told.get("accuracy")
        if self.run is not None:
            told = _json(self.run / "summary.json").get("results")
        return [each for each in told if isinstance(each, dict)] if isinstance(told, list) else []

    def sha256_of(self, name: str) -> str | None:
        """The hash that the manifest gives a file."""
        found = [each.get("sha256") for each in _listed(self.told) if each.get("name") == name]
        return str(found[0]) if found and found[0] else None


def origin_of(artefact: Artefact) -> Origin:
    """What the manifest beside an artefact says, or else its own header, and the run's folder, if it is near."""
    path = artefact.path.parent / FILE
    told = _json(path) if path.is_file() else artefact.header
    listed = _listed(told)
    unlisted = bool(listed) and all(each.get("name") != artefact.path.name for each in listed)
    told = artefact.header if unlisted else told  # what it says is of another network, for all that is known
    told = {**told, **told["manifest"]} if isinstance(told.get("manifest"), dict) else told
    return Origin(told, _run(artefact.path.resolve().parent, told), unlisted)


def _listed(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The files of a manifest, each with its name."""
    listed = told.get("files")
    if isinstance(listed, dict):
        return [{"name": key, **each} for key, each in listed.items() if isinstance(each, dict)]
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _run(folder: Path, told: Mapping[str, Any]) -> Path | None:
    """The run that a manifest names, or, if it names none, the one whose folder the file lies in."""
    provenance = told.get("provenance")
    named = provenance if isinstance(provenance, dict) else {}
    around = [each for each in (folder, folder.parent) if _is_run(each)]
    name = named.get("run")
    if not isinstance(name, str) or not name:
        return around[0] if around else None
    name = Path(name).name
    # A folder that was renamed is known by its recipe.
    recipes = {each: _json(each / "summary.json").get("recipe") for each in around}
    mine = [each for each in around if each.name == name or recipes[each] == named.get("recipe") is not None]
    beside = [each / name for each in (folder, folder.parent, folder.parent.parent, Path("runs"))]
    return next((each for each in [*mine, *beside] if _is_run(each)), None)


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and (folder / "summary.json").is_file()


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} is too large: {path.stat().st_size} bytes, expected at most {_LARGEST}")
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected an object")
    return found
