"""The twin of an artefact: a torch network that computes the same, for attacks that need gradients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harp import models
from harp.attacks import Ball
from harp.data import registry
from harp.data.registry import DataSet
from harp.deploy.exported_eval.manifest import Origin
from harp.deploy.exported_eval.open import Artefact
from harp.errors import CheckpointError, DataError, HarpError, ModelError, RecipeError
from harp.evaluation import accuracy
from harp.evaluation.predict import answer, as_input, example_of
from harp.experiments import build, recipe, run_folder
from harp.models import MODELS
from harp.system.files import reason

_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")


@dataclass(frozen=True)
class Twin:
    """A torch network, and a text that says where it comes from."""

    model: nn.Module
    words: str


@dataclass(frozen=True)
class Subjects:
    """An artefact, its twin if there is one, and the data set and threat model of their evaluation."""

    artefact: Artefact
    origin: Origin
    data: DataSet
    threat: Ball
    twin: Twin | None
    original: Twin | None = None  # the run's own network, if the twin is another one
    remark: str = ""  # why `original` is missing although there is a run


def prepared(
    artefact: Artefact,
    origin: Origin,
    *,
    data_name: str | None = None,
    data_dir: Path | None = None,
    twin: str | None = None,
    weights: Path | None = None,
) -> Subjects:
    """Everything that is needed to attack an artefact.

    The twin is the one that `twin` names (a run's folder, a checkpoint, or a model with `weights`), else the graph in
    the file itself, else the network of the run that the file came from, if that is available.
    """
    if weights is not None and twin is None:
        raise RecipeError(f"--weights {weights}: an artefact has its own; with --twin MODEL they are the twin's")
    named_run = Path(twin) if twin is not None and Path(twin).is_dir() else None
    run = named_run or origin.run
    run_recipe = None if run is None else run_folder.recipe_of(run)
    name = data_name or origin.data or (run_recipe.data.name if run_recipe is not None else None)
    if name is None:
        why = "the manifest beside it does not list it" if origin.unlisted else "no manifest or run says it"
        raise RecipeError(f"no data set for {artefact.path.name}: {why}, add --data")
    source = registry.load(name, data_dir) if run_recipe is None else run_recipe.data.load(data_dir, name=name)
    _check(artefact, source)
    chosen = _named(twin, weights, origin, source, name, data_dir) if twin is not None else None
    original, remark = None, ""
    if run is not None and named_run is None and (chosen is not None or artefact.graph is not None):
        try:
            original = _of_run(run, name, data_dir)
        except HarpError as error:  # the comparison is optional
            remark = f"not compared with the run {run.name}: {error}"
    if chosen is None and artefact.graph is not None:
        chosen = Twin(artefact.graph(), f"the graph in {artefact.path.name}")
    if chosen is None and run is not None:
        chosen = _of_run(run, name, data_dir)
    for network in (chosen, original):
        if network is not None:
            _check_twin(artefact, network, source)
    threat = _stated(origin) if run_recipe is None else build.threat(run_recipe)
    return Subjects(artefact, origin, source, threat, chosen, original, remark)


def _check(artefact: Artefact, source: DataSet) -> None:
    model = artefact.model
    if model.shape != source.shape:
        shapes = f"{'x'.join(map(str, model.shape))}, {source.name} has images of {'x'.join(map(str, source.shape))}"
        raise DataError(f"{artefact.path.name} takes images of {shapes}: is this its data set?")
    if model.classes != source.num_classes:
        counts = f"{model.classes} classes, {source.name} has {source.num_classes}"
        raise DataError(f"{artefact.path.name} knows {counts}: is this its data set?")


def _check_twin(artefact: Artefact, twin: Twin, source: DataSet) -> None:
    x = as_input(source.test.images[:1], example_of(twin.model, source.test.images))
    try:
        classes = answer(twin.model, x).shape[1]
    except HarpError:
        raise
    except Exception as error:  # a model from another package may raise anything
        raise ModelError(f"{twin.words} can't take the images of {source.name}: {reason(error)}") from error
    if classes != artefact.model.classes:
        raise ModelError(
            f"{twin.words} knows {classes} classes, {artefact.path.name} {artefact.model.classes}: no twin"
        )


def _of_run(run: Path, data_name: str, data_dir: Path | None) -> Twin:
    return Twin(build.load(str(run), data_name, data_dir, None).model, f"the run {run.name}")


def _named(
    twin: str, weights: Path | None, origin: Origin, source: DataSet, data_name: str, data_dir: Path | None
) -> Twin:
    """The twin that `--twin` names."""
    path = Path(twin)
    if path.is_dir():
        if weights is not None:
            raise RecipeError(f"--weights {weights}: the run {twin} has its own weights")
        return _of_run(path, data_name, data_dir)
    if path.suffix.lower() in _WEIGHTS or (path.is_file() and path.suffix != ".py"):
        if weights is not None:
            raise RecipeError(
                f"--twin {twin} and --weights {weights} are both weights: give --twin MODEL --weights FILE"
            )
        if not path.is_file():
            raise CheckpointError(f"there is no twin at {twin}: give a run's folder, a checkpoint or a model")
        return Twin(build.build(_architecture(origin, twin), source, path), path.name)
    if weights is None and twin in MODELS:
        raise RecipeError(f"--twin {twin} is a network without weights: add --weights FILE")
    try:
        model = build.build(recipe.Model(name=twin), source, weights)
    except ModelError as error:
        raise ModelError(f"--twin {twin}: {error}") from error
    file = models.source_file(twin)
    name = twin if file is None else f"{Path(file).name}:{twin.rpartition(':')[2]}"
    return Twin(model, name if weights is None else f"{name} with {weights.name}")


def _architecture(origin: Origin, twin: str) -> recipe.Model:
    """The architecture of a checkpoint: the run's, else the one in the manifest."""
    run_recipe = origin.recipe
    if run_recipe is not None:
        return run_recipe.model
    architecture = origin.manifest.get("architecture")
    if not isinstance(architecture, dict) or not isinstance(architecture.get("name"), str):
        raise RecipeError(f"nothing says which architecture {twin} is for: give --twin MODEL --weights {twin}")
    fields: dict[str, Any] = {**(architecture.get("options") or {}), "name": architecture["name"]}
    normalisation = origin.manifest.get("normalisation")
    if isinstance(normalisation, dict):
        fields["normalize"] = (normalisation.get("mean"), normalisation.get("std"))
    try:
        return recipe.Model(**fields)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the manifest's architecture can't be read: {' '.join(str(error).split())[:200]}") from error


def _stated(origin: Origin) -> Ball:
    """The epsilon and norm of the last attack with a stated accuracy."""
    for result in reversed(origin.accuracies):
        attack = {**result, **result["attack"]} if isinstance(result.get("attack"), dict) else result
        if isinstance(attack.get("epsilon"), (int, float)):
            try:
                return Ball(attack["epsilon"], attack.get("norm", accuracy.DEFAULT.norm))
            except HarpError:
                continue
    return accuracy.DEFAULT
