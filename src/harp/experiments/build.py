"""Parts of a recipe as objects: model, units, pruner, attacks, and the network of a run with its data."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from harp import attacks
from harp.attacks import Ball
from harp.data import registry
from harp.data.batches import Augment, ResizedCrop
from harp.data.streaming.images import Streamed
from harp.errors import RecipeError
from harp.evaluation.accuracy import DEFAULT, Subject
from harp.experiments import recipe, run_folder
from harp.experiments.image_size import image_size
from harp.experiments.places import Places
from harp.models import has_weights, zoo
from harp.models.normalize import constants
from harp.models.weights import load_weights
from harp.pruning import methods
from harp.pruning.channels import Channels, Latency, price
from harp.pruning.masks import Masks
from harp.pruning.units import Units, Weights
from harp.training import objectives


def load(
    target: str,
    data_name: str | None,
    data_dir: Path | None,
    weights: str | None,
    *,
    size: int | None = None,
    normalize: str | None = None,
) -> Subject:
    """The network and data to evaluate: those of a run's folder, or a model and a data set.

    `size` is that of images that are resized, `normalize` the text of a normalisation; both are for models only.
    """
    if weights is not None and has_weights(target):
        raise RecipeError(f"--weights {weights}: {target} has weights of its own")
    folder = run_folder.place(target)
    if folder.is_dir() and (size is not None or normalize is not None):
        raise RecipeError(f"--size and --normalize are for models: {target} is a run, which has its own")
    if folder.is_dir():
        run = run_folder.read(folder) if weights is None else None
        made = run_folder.recipe_of(folder) if run is None else run.recipe
        source = run_folder.load_data(folder, data_dir, data_name, made=made)
        part = Places.read(folder).model_of(made)
        if run is None:
            return Subject(build(part, source, weights), source, threat(made))
        before = _dense_weights(run)
        dense = None if before is None else build(part, source, before)
        model = run.network(source.shape, source.num_classes).model
        return Subject(model, source, threat(made), dense, tuple(stage.folder for stage in run.stages[-1:]))
    if os.sep in target and ":" not in target:
        raise RecipeError(f"there is no folder {target} (give a folder that `harp run` made, or a model)")
    if Path(target).is_file():
        raise RecipeError(f"{target} is a file: give a run's folder, a .harp or .onnx file, or a model")
    if data_name is None:
        raise RecipeError(f"there is no run {target!r}; if it is a model, add --data (see `harp list data`)")
    source = registry.load(data_name, data_dir, image_size(data_name, data_dir, size, target))
    part = recipe.Model(name=target, normalize=None if normalize is None else constants(normalize))
    trained = zoo.name_in(target)
    trained_for = DEFAULT if trained is None else Ball(zoo.card(trained)["epsilon"])
    return Subject(build(part, source, weights), source, trained_for)


def _dense_weights(run: run_folder.Finished) -> Path | None:
    """The weights before pruning, if the run pruned a network and the file is still there."""
    names = [stage.pruner["name"] for stage in run.recipe.stages]
    first = next((number for number, name in enumerate(names) if name != "dense"), 0)
    file = run.places.weights_of(run.recipe) if first == 0 else None
    if 0 < first <= len(run.stages):
        file = run.stages[first - 1].folder / "model.safetensors"
    return file if file is not None and file.is_file() else None


def build(part: recipe.Model, source: registry.DataSet, weights: str | Path | None) -> nn.Module:
    """The model of a recipe for a data set, with weights from a file if there is one."""
    model = part.build(source.num_classes, source.shape)
    if weights is not None:
        load_weights(model, weights)
    return model


def units_of(part: recipe.Units, model: nn.Module, source: registry.DataSet, latency: Latency | None = None) -> Units:
    """The units of a model that a recipe prunes; a budget of latency may use times that were measured before."""
    if part.kind == "channels":
        options = part.options() if latency is None else {**part.options(), "budget": latency}
        return Channels(model, noise_of(source), **options)
    return Weights(model, example=noise_of(source), **part.options())


def size_of(part: recipe.Units, model: nn.Module, source: registry.DataSet) -> int:
    """The size of a whole model in what the budget counts, even if nothing in it can be pruned."""
    if part.kind == "channels":
        return price(model, noise_of(source), part.budget or "flops")
    return units_of(part, model, source).size


def noise_of(source: registry.DataSet) -> torch.Tensor:
    """Two noise images of a data set's shape, to trace channels through a model."""
    return torch.rand(2, *source.shape, generator=torch.Generator().manual_seed(0))


def pruner(stage: recipe.Stage, units: Units, before: Masks | None, seed: int) -> methods.Pruner:
    """The pruner of a stage; `before` are the masks of the stage before it."""
    options = {key: value for key, value in stage.pruner.items() if key != "name"}
    if stage.pruner["name"] == "fixed":
        if before is None:
            raise RecipeError(f"stage {stage.name!r}: 'fixed' keeps the masks of an earlier stage, and there is none")
        options["masks"] = before
    method = methods.PRUNERS[stage.pruner["name"]]
    if "seed" in inspect.signature(method).parameters:
        options["seed"] = seed
    return method(units, **options)


def optimizer(part: recipe.Optimizer) -> Callable[[list[methods.ParameterGroup]], Optimizer] | None:
    """What makes a stage's optimiser; None for the default of the loop, SGD."""
    if part.name == "sgd":
        return None
    return lambda groups: AdamW(groups, lr=part.lr, weight_decay=part.weight_decay)


def augmentation(part: recipe.Data, train: registry.Split, flip: bool) -> Augment | ResizedCrop | None:
    """The augmentation of training images."""
    if not part.augment:
        return None
    if part.crop == "resized" and isinstance(train.images, Streamed):
        return ResizedCrop(flip=flip)
    return Augment(part.pad, flip)


def threat(made: recipe.Recipe) -> Ball:
    """The ball that a recipe evaluates in: its objective's, unless the evaluation has an epsilon of its own."""
    trained = getattr(objectives.made(made.objective), "epsilon", DEFAULT.epsilon)
    epsilon = trained if made.evaluate.epsilon is None else made.evaluate.epsilon
    return Ball(epsilon, made.objective.get("norm", DEFAULT.norm))


def attack_of(part: str | Mapping[str, Any], ball: Ball) -> tuple[str, Any]:
    """The name of an attack and the attack: by text inside a ball, or by a mapping with options of its own."""
    if isinstance(part, str):
        return part, attacks.named(part, epsilon=ball.epsilon, norm=ball.norm)
    options = {key: value for key, value in part.items() if key != "name"}
    texts = [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()]
    return ",".join([part["name"], *texts]), attacks.ATTACKS[part["name"]](**options)
