"""The twin of an artefact: a torch network that computes the same, for attacks that need gradients.

The artefact's manifest, and the run that it came from, say which network, data set and threat model belong to it.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harp import models
from harp.attacks import Ball
from harp.data import registry
from harp.data.registry import DataSet
from harp.deploy.exported_eval.open import Artefact, opened
from harp.errors import CheckpointError, DataError, HarpError, ModelError, RecipeError
from harp.evaluation import accuracy
from harp.evaluation.predict import answer, as_input, example_of
from harp.experiments import build, run_folder
from harp.experiments.recipe import Model
from harp.experiments.run_folder import Finished
from harp.models import MODELS
from harp.system import files
from harp.system.files import reason

_MANIFEST = "manifest.json"
_LARGEST = 1 << 24  # bytes of a manifest
_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")


@dataclass(frozen=True)
class Origin:
    """Where an artefact comes from, as far as its files say."""

    manifest: Mapping[str, Any]  # the content of the manifest
    run: Finished | None  # the run, if it is available
    unlisted: bool = False  # whether the manifest beside the file lists only other files

    @property
    def data(self) -> str | None:
        """The name of its data set: from the run, else from the manifest's accuracies."""
        if self.run is not None:
            return self.run.recipe.data.name
        names = [self.manifest.get("data"), *(result.get("data") for result in self.accuracies)]
        return next((name for name in names if isinstance(name, str) and name), None)

    @property
    def accuracies(self) -> list[Mapping[str, Any]]:
        """Its stated accuracies: from the run, else from the manifest."""
        results = self.manifest.get("accuracy") if self.run is None else self.run.summary["results"]
        return [result for result in results if isinstance(result, dict)] if isinstance(results, list) else []

    @property
    def stated_threat(self) -> Ball:
        """The epsilon and norm of the last attack with a stated accuracy."""
        for result in reversed(self.accuracies):
            if isinstance(result.get("epsilon"), (int, float)):
                with suppress(HarpError):
                    return Ball(result["epsilon"], result.get("norm", accuracy.DEFAULT.norm))
        return accuracy.DEFAULT

    def sha256_of(self, name: str) -> str | None:
        """The hash of a file in the manifest."""
        sha256 = _listed(self.manifest).get(name, {}).get("sha256")
        return str(sha256) if sha256 else None

    def architecture(self, weights: str) -> Model:
        """The architecture of a checkpoint: the run's, else the one in the manifest."""
        if self.run is not None:
            return self.run.places.model_of(self.run.recipe)
        stated = self.manifest.get("architecture")
        if not isinstance(stated, dict) or not isinstance(stated.get("name"), str):
            advice = f"give --twin MODEL --weights {weights}"
            raise RecipeError(f"nothing says which architecture {weights} is for: {advice}")
        normalisation = self.manifest.get("normalisation")
        try:
            fields: dict[str, Any] = {**(stated.get("options") or {}), "name": stated["name"]}
            if isinstance(normalisation, dict):
                fields["normalize"] = (normalisation.get("mean"), normalisation.get("std"))
            return Model(**fields)
        except (TypeError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            raise RecipeError(f"the manifest's architecture can't be read: {text}") from error


def origin_of(artefact: Artefact) -> Origin:
    """Read the manifest beside an artefact, or its own header if there is none, and find the run's folder."""
    path = artefact.path.parent / _MANIFEST
    manifest = files.read_json(path, _LARGEST) if path.is_file() else artefact.header
    unlisted = artefact.path.name not in (_listed(manifest) or [artefact.path.name])
    manifest = artefact.header if unlisted else manifest  # it may describe another network
    manifest = {**manifest, **manifest["manifest"]} if isinstance(manifest.get("manifest"), dict) else manifest
    return Origin(manifest, run_of(artefact.path.resolve().parent, manifest), unlisted)


def _listed(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The entries of a manifest's files, by name."""
    listed = manifest.get("files")
    entries = listed if isinstance(listed, dict) else {}
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def run_of(folder: Path, manifest: Mapping[str, Any]) -> Finished | None:
    """The run that a manifest in a folder names; if it names none, the run whose folder holds the file."""
    provenance = manifest.get("provenance")
    stated = provenance if isinstance(provenance, dict) else {}
    name, recipe = stated.get("run"), stated.get("recipe")
    around = [run_folder.read(path, weights=False) for path in (folder, folder.parent) if _is_run(path)]
    if not isinstance(name, str) or not name:
        return around[0] if around else None
    name = Path(name).name
    for run in around:  # a renamed folder is recognised by its recipe
        if run.folder.name == name or run.summary["recipe"] == recipe is not None:
            return run
    places = (path / name for path in (folder, folder.parent, folder.parent.parent, Path("runs")))
    return next((run_folder.read(path, weights=False) for path in places if _is_run(path)), None)


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and (folder / "summary.json").is_file()


@dataclass(frozen=True)
class Twin:
    """A torch network, and a text that says where it comes from."""

    model: nn.Module
    words: str


@dataclass(frozen=True)
class Setup:
    """An artefact, its twin if there is one, and the data set and threat model of their evaluation."""

    artefact: Artefact
    origin: Origin
    data: DataSet
    threat: Ball
    twin: Twin | None
    original: Twin | None = None  # the run's own network, if the twin is another one
    notes: tuple[str, ...] = ()  # what could not be used, and why


def prepared(
    path: Path,
    *,
    data_name: str | None = None,
    data_dir: Path | None = None,
    twin: str | None = None,
    weights: Path | None = None,
) -> Setup:
    """Open a file, and find everything that is needed to attack it.

    The twin is the one that `twin` names (a run's folder, a checkpoint, or a model with `weights`), else the graph in
    the file itself, else the network of the run that the file came from, if that is available.
    """
    if weights is not None and twin is None:
        raise RecipeError(f"--weights {weights}: an artefact has its own; with --twin MODEL they are the twin's")
    artefact = opened(path)
    origin = origin_of(artefact)
    named_run = Path(twin) if twin is not None and Path(twin).is_dir() else None
    own_recipe = None if origin.run is None else origin.run.recipe
    recipe = own_recipe if named_run is None else run_folder.recipe_of(named_run)
    name = data_name or origin.data or (None if recipe is None else recipe.data.name)
    if name is None:
        why = "the manifest beside it does not list it" if origin.unlisted else "no manifest or run says it"
        raise RecipeError(f"no data set for {artefact.path.name}: {why}, add --data")
    home = named_run or (None if origin.run is None else origin.run.folder)
    if home is None:
        if data_name is None and data_dir is None and registry.is_users(name):
            raise RecipeError(f"the data of {artefact.path.name} was its maker's own: give yours by --data")
        size = artefact.model.shape[1] if registry.find(name, data_dir).resizes else None
        data = registry.load(name, data_dir, size)
    else:
        data = run_folder.load_data(home, data_dir, name)
    _check_data(artefact, data)

    def of_run(folder: Path) -> Twin:
        return Twin(build.load(str(folder), name, data_dir, None).model, f"the run {folder.name}")

    chosen, original, notes = None, None, list[str]()
    if origin.unlisted:
        notes.append(f"the manifest beside {path.name} does not list it: it is taken for another network's")
    if named_run is not None:
        if weights is not None:
            raise RecipeError(f"--weights {weights}: the run {twin} has its own weights")
        chosen = of_run(named_run)
    elif twin is not None:
        chosen = _named(twin, weights, origin, data)
    elif artefact.in_torch is not None:
        chosen = Twin(artefact.in_torch(), f"the graph in {artefact.path.name}")
    elif origin.run is not None:
        chosen = of_run(origin.run.folder)
    if origin.run is not None and named_run is None and (twin is not None or artefact.in_torch is not None):
        try:
            original = of_run(origin.run.folder)
        except HarpError as error:  # the comparison is optional
            notes.append(f"not compared with the run {origin.run.folder.name}: {error}")
    for network in (chosen, original):
        if network is not None:
            _check_twin(artefact, network, data)
    threat = origin.stated_threat if recipe is None else build.threat(recipe)
    return Setup(artefact, origin, data, threat, chosen, original, tuple(notes))


def _check_data(artefact: Artefact, data: DataSet) -> None:
    model = artefact.model
    if model.shape != data.shape:
        own, other = ("x".join(map(str, shape)) for shape in (model.shape, data.shape))
        text = f"takes images of {own}, {data.name} has images of {other}"
        raise DataError(f"{artefact.path.name} {text}: is this its data set?")
    if model.classes != data.num_classes:
        counts = f"{model.classes} classes, {data.name} has {data.num_classes}"
        raise DataError(f"{artefact.path.name} knows {counts}: is this its data set?")


def _check_twin(artefact: Artefact, twin: Twin, data: DataSet) -> None:
    x = as_input(data.test.images[:1], example_of(twin.model, data.test.images))
    try:
        classes = answer(twin.model, x).shape[1]
    except HarpError:
        raise
    except Exception as error:  # a model from another package may raise anything
        raise ModelError(f"{twin.words} can't take the images of {data.name}: {reason(error)}") from error
    if classes != artefact.model.classes:
        counts = f"{classes} classes, {artefact.path.name} {artefact.model.classes}"
        raise ModelError(f"{twin.words} knows {counts}: no twin")


def _named(twin: str, weights: Path | None, origin: Origin, data: DataSet) -> Twin:
    """The twin that `--twin` names: a checkpoint or a model."""
    path = Path(twin)
    if path.suffix.lower() in _WEIGHTS or (path.is_file() and path.suffix != ".py"):
        if weights is not None:
            both = f"--twin {twin} and --weights {weights}"
            raise RecipeError(f"{both} are both weights: give --twin MODEL --weights FILE")
        if not path.is_file():
            raise CheckpointError(f"there is no twin at {twin}: give a run's folder, a checkpoint or a model")
        return Twin(build.build(origin.architecture(twin), data, path), path.name)
    if weights is None and twin in MODELS:
        raise RecipeError(f"--twin {twin} is a network without weights: add --weights FILE")
    try:
        model = build.build(Model(name=twin), data, weights)
    except ModelError as error:
        raise ModelError(f"--twin {twin}: {error}") from error
    file = models.source_file(twin)
    name = twin if file is None else f"{Path(file).name}:{twin.rpartition(':')[2]}"
    return Twin(model, name if weights is None else f"{name} with {weights.name}")
