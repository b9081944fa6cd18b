"""Parts of a recipe as objects: model, units, attacks, and the network of a run with its data."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harp import attacks
from harp.attacks import Ball
from harp.data import registry
from harp.errors import RecipeError
from harp.evaluation.accuracy import DEFAULT, Subject
from harp.experiments import finished_run, recipe, run_folder
from harp.experiments.run_folder import RunFolder
from harp.models.weights import load_weights
from harp.pruning.channels import Channels, Latency, price
from harp.pruning.units import Units, Weights
from harp.training import objectives


def load(target: str, data_name: str | None, data_dir: Path | None, weights: str | None) -> Subject:
    """A subject from a run's folder, or from a model and a data set."""
    folder = Path(target)
    if folder.is_dir():
        run = finished_run.read(folder) if weights is None else None
        made = run_folder.recipe_of(folder) if run is None else run.recipe
        source = registry.load(data_name or made.data.name, data_dir, **made.data.loading())
        if run is None:
            return Subject(build(made.model, source, weights), source, threat(made))
        before = _dense_weights(run)
        dense = None if before is None else build(made.model, source, before)
        model = run.network(source.shape, source.num_classes).model
        return Subject(model, source, threat(made), dense, tuple(stage.folder for stage in run.stages[-1:]))
    if os.sep in target and ":" not in target:
        raise RecipeError(f"there is no folder {target} (give a folder that `harp run` made, or a model)")
    if data_name is None:
        raise RecipeError(f"there is no run {target!r}; if it is a model, add --data (see `harp list data`)")
    source = registry.load(data_name, data_dir)
    return Subject(build(recipe.Model(name=target), source, weights), source)


def _dense_weights(run: RunFolder) -> Path | None:
    """The file of the network as it was before pruning, if the run pruned one and its stage is still there."""
    names = [stage.pruner["name"] for stage in run.recipe.stages]
    first = next((number for number, name in enumerate(names) if name != "dense"), 0)
    given = run.recipe.model.weights
    file = Path(given) if first == 0 and given else None
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
    """What a recipe prunes of a model; times that were measured before stand for a budget of latency."""
    if part.kind == "channels":
        options = part.options() if latency is None else {**part.options(), "budget": latency}
        return Channels(model, noise_of(source), **options)
    return Weights(model, example=noise_of(source), **part.options())


def size_of(part: recipe.Units, model: nn.Module, source: registry.DataSet) -> int:
    """What a recipe's budget counts of a whole model, even if there is nothing to prune in it."""
    if part.kind == "channels":
        return price(model, noise_of(source), part.budget or "flops")
    return units_of(part, model, source).size


def noise_of(source: registry.DataSet) -> torch.Tensor:
    """Two images of a data set's shape, of noise: to follow channels through a model."""
    return torch.rand(2, *source.shape, generator=torch.Generator().manual_seed(0))


def threat(made: recipe.Recipe) -> Ball:
    """The ball that a recipe evaluates in: its objective's, unless the evaluation has an epsilon of its own."""
    usual = getattr(objectives.made(made.objective), "epsilon", DEFAULT.epsilon)
    epsilon = usual if made.evaluate.epsilon is None else made.evaluate.epsilon
    return Ball(epsilon, made.objective.get("norm", DEFAULT.norm))


def attack_of(wish: str | Mapping[str, Any], ball: Ball) -> tuple[str, Any]:
    """The name and the attack that a recipe or a flag asks for: by text within a ball, or with options of its own."""
    if isinstance(wish, str):
        return wish, attacks.named(wish, epsilon=ball.epsilon, norm=ball.norm)
    options = {key: value for key, value in wish.items() if key != "name"}
    words = [
        wish["name"],
        *(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()),
    ]
    return ",".join(words), attacks.ATTACKS[wish["name"]](**options)
