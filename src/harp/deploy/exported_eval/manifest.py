"""The origin of an artefact: its manifest, and the run that it came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harp.deploy.exported_eval.open import Artefact
from harp.experiments import run_folder
from harp.experiments.recipe import Recipe
from harp.system import files

FILE = "manifest.json"
_LARGEST = 1 << 24  # bytes of a manifest


@dataclass(frozen=True)
class Origin:
    """Where an artefact comes from, as far as its files say."""

    manifest: Mapping[str, Any]  # the content of the manifest
    run: Path | None  # the run's folder, if it is available
    unlisted: bool = False  # whether the manifest beside the file lists only other files

    @property
    def recipe(self) -> Recipe | None:
        """The run's recipe."""
        return None if self.run is None else run_folder.recipe_of(self.run)

    @property
    def data(self) -> str | None:
        """The name of its data set: from the run, else from the manifest's accuracies."""
        recipe = self.recipe
        if recipe is not None:
            return recipe.data.name
        names = [self.manifest.get("data"), *(result.get("data") for result in self.accuracies)]
        return next((name for name in names if isinstance(name, str) and name), None)

    @property
    def accuracies(self) -> list[Mapping[str, Any]]:
        """Its stated accuracies: from the run, else from the manifest."""
        results = self.manifest.get("accuracy")
        if self.run is not None:
            results = run_folder.read(self.run, weights=False).summary["results"]
        return [result for result in results if isinstance(result, dict)] if isinstance(results, list) else []

    def sha256_of(self, name: str) -> str | None:
        """The hash of a file in the manifest."""
        hashes = [entry.get("sha256") for entry in _listed(self.manifest) if entry.get("name") == name]
        return str(hashes[0]) if hashes and hashes[0] else None


def origin_of(artefact: Artefact) -> Origin:
    """Read the manifest beside an artefact, or its own header if there is none, and find the run's folder."""
    path = artefact.path.parent / FILE
    manifest = files.read_json(path, _LARGEST) if path.is_file() else artefact.header
    listed = _listed(manifest)
    unlisted = bool(listed) and all(entry.get("name") != artefact.path.name for entry in listed)
    manifest = artefact.header if unlisted else manifest  # it may describe another network
    manifest = {**manifest, **manifest["manifest"]} if isinstance(manifest.get("manifest"), dict) else manifest
    return Origin(manifest, _run(artefact.path.resolve().parent, manifest), unlisted)


def _listed(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The files of a manifest, each with its name."""
    listed = manifest.get("files")
    if isinstance(listed, dict):
        return [{"name": key, **entry} for key, entry in listed.items() if isinstance(entry, dict)]
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _run(folder: Path, manifest: Mapping[str, Any]) -> Path | None:
    """The run that a manifest names; if it names none, the run whose folder holds the file."""
    provenance = manifest.get("provenance")
    source = provenance if isinstance(provenance, dict) else {}
    around = [path for path in (folder, folder.parent) if _is_run(path)]
    name = source.get("run")
    if not isinstance(name, str) or not name:
        return around[0] if around else None
    name = Path(name).name
    # A renamed folder is recognised by its recipe.
    recipes = {path: run_folder.read(path, weights=False).summary["recipe"] for path in around}
    matching = [path for path in around if path.name == name or recipes[path] == source.get("recipe") is not None]
    beside = [path / name for path in (folder, folder.parent, folder.parent.parent, Path("runs"))]
    return next((path for path in [*matching, *beside] if _is_run(path)), None)


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and (folder / "summary.json").is_file()
