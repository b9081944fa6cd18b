"""The twin of an artefact: a network of torch that computes the same, for the attacks that need gradients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harp import assess, data, models, recipe
from harp.answers import answer, as_input, example_of
from harp.attacks import Ball
from harp.data import DataSet
from harp.deployed.manifest import Origin
from harp.deployed.opening import Artefact
from harp.errors import CheckpointError, DataError, HarpError, ModelError, RecipeError
from harp.files import reason
from harp.models import MODELS

_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")


@dataclass(frozen=True)
class Twin:
    """A network of torch, and where it is from."""

    model: nn.Module
    words: str


@dataclass(frozen=True)
class Subjects:
    """An artefact, its twin if there is one, and the data and the threat that both are measured by."""

    artefact: Artefact
    origin: Origin
    data: DataSet
    threat: Ball
    twin: Twin | None
    original: Twin | None = None  # the run's own network, where the twin is another one
    remark: str = ""  # why there is none although there is a run


def prepared(
    artefact: Artefact,
    origin: Origin,
    *,
    data_name: str | None = None,
    data_dir: Path | None = None,
    twin: str | None = None,
    weights: Path | None = None,
) -> Subjects:
    """All that is needed to attack an artefact.

    The twin is what `twin` names (a run's folder, a checkpoint, or a model with `weights`), else what the file itself
    holds, else the network of the run that it came from, if that is at hand.
    """
    if weights is not None and twin is None:
        raise RecipeError(f"--weights {weights}: an artefact has its own; with --twin MODEL they are the twin's")
    given = Path(twin) if twin is not None and (Path(twin) / "recipe.yaml").is_file() else None
    run = given or origin.run
    made = None if run is None else recipe.load(run / "recipe.yaml")
    name = data_name or origin.data or (made.data.name if made is not None else None)
    if name is None:
        why = "the manifest beside it does not list it" if origin.unlisted else "no manifest or run says it"
        raise RecipeError(f"no data set for {artefact.path.name}: {why}, add --data")
    source = data.load(name, data_dir, **({} if made is None else made.data.loading()))
    _check(artefact, source)
    chosen = _named(twin, weights, origin, source, name, data_dir) if twin is not None else None
    original, remark = None, ""
    if run is not None and given is None and (chosen is not None or artefact.graph is not None):
        try:
            original = _of_run(run, name, data_dir)
        except HarpError as error:  # it is not needed, only good to have
            remark = f"not compared with the run {run.name}: {error}"
    if chosen is None and artefact.graph is not None:
        chosen = Twin(artefact.graph(), f"the graph in {artefact.path.name}")
    if chosen is None and run is not None:
        chosen = _of_run(run, name, data_dir)
    for each in (chosen, original):
        if each is not None:
            _check_twin(artefact, each, source)
    threat = _stated(origin) if made is None else assess.threat(made)
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
    except Exception as error:  # a model of somebody else's may raise anything
        raise ModelError(f"{twin.words} can't take the images of {source.name}: {reason(error)}") from error
    if classes != artefact.model.classes:
        raise ModelError(
            f"{twin.words} knows {classes} classes, {artefact.path.name} {artefact.model.classes}: no twin"
        )


def _of_run(run: Path, data_name: str, data_dir: Path | None) -> Twin:
    return Twin(assess.load(str(run), data_name, data_dir, None).model, f"the run {run.name}")


def _named(
    twin: str, weights: Path | None, origin: Origin, source: DataSet, data_name: str, data_dir: Path | None
) -> Twin:
    """The twin that somebody names."""
    path = Path(twin)
    if path.is_dir() or (path / "recipe.yaml").is_file():
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
        return Twin(assess.build(_architecture(origin, twin), source, path), path.name)
    if weights is None and twin in MODELS:
        raise RecipeError(f"--twin {twin} is a network without weights: add --weights FILE")
    try:
        made = assess.build(recipe.Model(name=twin), source, weights)
    except ModelError as error:
        raise ModelError(f"--twin {twin}: {error}") from error
    file = models.source_file(twin)
    name = twin if file is None else f"{Path(file).name}:{twin.rpartition(':')[2]}"
    return Twin(made, name if weights is None else f"{name} with {weights.name}")


def _architecture(origin: Origin, twin: str) -> recipe.Model:
    """The architecture that a checkpoint's weights are for: the run's, or as the manifest has it."""
    made = origin.recipe
    if made is not None:
        return made.model
    told = origin.told.get("architecture")
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        raise RecipeError(f"nothing says which architecture {twin} is for: give --twin MODEL --weights {twin}")
    fields: dict[str, Any] = {**(told.get("options") or {}), "name": told["name"]}
    inside = origin.told.get("normalisation")
    if isinstance(inside, dict):
        fields["normalize"] = (inside.get("mean"), inside.get("std"))
    try:
        return recipe.Model(**fields)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the manifest's architecture can't be read: {' '.join(str(error).split())[:200]}") from error


def _stated(origin: Origin) -> Ball:
    """The ball of the last attack that a number was stated for."""
    for found in reversed(origin.accuracies):
        attack = {**found, **found["attack"]} if isinstance(found.get("attack"), dict) else found
        if isinstance(attack.get("epsilon"), (int, float)):
            try:
                return Ball(attack["epsilon"], attack.get("norm", assess.DEFAULT.norm))
            except HarpError:
                continue
    return assess.DEFAULT
