"""Assessing a network on the test set: numbers that carry what they depend on."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harp import artefact, attacks, checkpoint, data, evaluate, models, objectives, recipe
from harp.answers import classes_of
from harp.assault import BATCH, Assault, Outcome
from harp.attacks import Ball
from harp.channels import Channels, Latency, price
from harp.errors import RecipeError
from harp.readable import readable
from harp.units import Units, Weights

DEFAULT = Ball(8 / 255, "linf")


@dataclass(frozen=True)
class Subject:
    """A network with the data that it is assessed on, and the ball of perturbations that it was made for."""

    model: nn.Module
    data: data.DataSet
    threat: Ball = DEFAULT
    dense: nn.Module | None = None  # the network before pruning, where a run has kept it


def load(target: str, data_name: str | None, data_dir: Path | None, weights: str | None) -> Subject:
    """A subject from a run's folder, or from a model and a data set."""
    folder = Path(target)
    if (folder / "recipe.yaml").is_file():
        made = recipe.load(folder / "recipe.yaml")
        if weights is None and not (folder / "summary.json").is_file():
            raise RecipeError(f"{target} is half a run: there is no summary.json in it (`harp run` goes on with it)")
        source = data.load(data_name or made.data.name, data_dir, **made.data.loading())
        before = _dense_weights(folder, made)
        dense = None if before is None or weights is not None else build(made.model, source, before)
        model = build(made.model, source, weights)
        if weights is None:
            artefact.load(folder, model)
        return Subject(model, source, threat(made), dense)
    if folder.is_dir():
        raise RecipeError(f"{target} is no run: there is no recipe.yaml in it (give a folder that `harp run` made)")
    if os.sep in target and ":" not in target:
        raise RecipeError(f"there is no folder {target} (give a folder that `harp run` made, or a model)")
    if data_name is None:
        raise RecipeError(f"there is no run {target!r}; if it is a model, add --data (see `harp list data`)")
    source = data.load(data_name, data_dir)
    return Subject(build(recipe.Model(name=target), source, weights), source)


def _dense_weights(folder: Path, made: recipe.Recipe) -> Path | None:
    """The file of the network as it was before pruning, if the run pruned one and its stage is still there."""
    names = [stage.pruner["name"] for stage in made.stages]
    first = next((number for number, name in enumerate(names) if name != "dense"), 0)
    if first == 0:
        return Path(made.model.weights) if made.model.weights and Path(made.model.weights).is_file() else None
    try:
        stages = json.loads((folder / "summary.json").read_text("utf-8"))["stages"]
    except (OSError, ValueError, KeyError):
        return None
    file = Path(folder.parent, stages[first - 1], "model.safetensors")
    return file if file.is_file() else None


def build(part: recipe.Model, source: data.DataSet, weights: str | Path | None) -> nn.Module:
    """The model of a recipe for a data set, with weights from a file if there is one."""
    shape, classes = source.shape, source.num_classes
    model = models.build(part.name, num_classes=classes, shape=shape, normalize=part.normalize, **part.options)
    if weights is not None:
        checkpoint.load_weights(model, weights)
    return model


def units_of(part: recipe.Units, model: nn.Module, source: data.DataSet, latency: Latency | None = None) -> Units:
    """What a recipe prunes of a model; times that were measured before stand for a budget of latency."""
    if part.kind == "channels":
        options = part.options() if latency is None else {**part.options(), "budget": latency}
        return Channels(model, noise_of(source), **options)
    return Weights(model, example=noise_of(source), **part.options())


def size_of(part: recipe.Units, model: nn.Module, source: data.DataSet) -> int:
    """What a recipe's budget counts of a whole model, even if there is nothing to prune in it."""
    if part.kind == "channels":
        return price(model, noise_of(source), part.budget or "flops")
    return units_of(part, model, source).size


def noise_of(source: data.DataSet) -> torch.Tensor:
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


def measure(
    model: nn.Module,
    source: data.DataSet,
    name: str,
    attack: Any,
    *,
    examples: int | None,
    seed: int,
    batch: int = BATCH,
    **care: Any,
) -> tuple[dict[str, Any], Outcome]:
    """One number: the value, its 95 % interval, and all that it depends on beside the network; and how it came about.

    `care` is what `harp.assault.Assault` takes to show its progress, to keep its state and to stop.
    """
    test = source.test.select(evaluate.subset(len(source.test), examples, seed))
    wanted, test = len(test), readable(test, care.get("progress")).split
    classes = classes_of(model, test.images, test.labels, source.num_classes)
    outcome = Assault(model, test.images, test.labels, attack, classes=classes, batch=batch, seed=seed, **care).run()
    score = evaluate.score(outcome.right, test.labels, attack, classes=classes, batch=batch, seed=seed)
    low, high = score.interval(balanced=source.balanced)
    found = {
        **score.as_dict(),
        "name": name,
        "measure": "balanced accuracy" if source.balanced else "accuracy",
        "value": score.balanced_accuracy if source.balanced else score.accuracy,
        "low": low,
        "high": high,
        "data": source.name,
        "source": source.source,
        "seed": seed,
    }
    if len(test) < wanted:
        found["undecodable"] = wanted - len(test)  # images that were left out
    return found, outcome
