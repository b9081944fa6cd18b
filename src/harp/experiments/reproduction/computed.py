"""Quantities that need no data: weights kept by a strategy, FLOPs of a network, gamma by epoch, epochs of a method."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harp.attacks import ATTACKS
from harp.errors import RecipeError
from harp.experiments import compose, stages
from harp.experiments.recipe import unknown
from harp.models import build, usual
from harp.pruning.allocation import STRATEGIES
from harp.pruning.methods import PRUNERS, Harp
from harp.pruning.units import Weights
from harp.training.objectives import OBJECTIVES

Value = list[float] | list[str] | float


def layer_counts(model: str, strategy: str, keep: str) -> Value:
    """The weights that a strategy keeps in each layer of an untrained network; not for strategies that read weights."""
    units = Weights(_model(model))
    return [float(count) for count in STRATEGIES[strategy](units, units.total(keep))]


def total_kept(model: str, keep: str) -> Value:
    """The exact budget of a network."""
    units = Weights(_model(model))
    return float(units.total(keep))


def size(model: str) -> Value:
    """The prunable weights of a network."""
    return float(Weights(_model(model)).size)


def multiply_adds(model: str) -> Value:
    """The multiplications of prunable weights for one image."""
    _, shape = usual(model)
    return float(Weights(_model(model), budget="macs", example=torch.zeros(1, *shape)).size)


def gamma(losses: list[float], step: float) -> Value:
    """HARP's gamma in each epoch, if its budget loss at the end of each is as given."""
    pruner = _Replayed(Weights(_model("tinynet")), keep=0.01, published=True, gamma_step=step)
    values = []
    for pruner.loss in losses:
        values.append(round(pruner.gamma, 10))
        pruner.after_epoch()
    return values


class _Replayed(Harp):
    """HARP with a budget loss that is given from outside."""

    loss: float

    def budget_loss(self) -> Tensor:
        return torch.tensor(self.loss)


def epochs(method: str, base: str = "cifar10/vgg16") -> Value:
    """The epochs of a method as published: pre-training, pruning, fine-tuning and their sum, or the sum alone."""
    recipe = compose.load(base)
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    parts = stages.parts(content["stages"])
    laid_out = stages.PROTOCOLS["paper"].stages(parts, {"name": method, "keep": 0.01}, content.get("objective"))
    lengths = [float(stage["epochs"]) for stage in laid_out]
    return [*lengths, sum(lengths)] if len(lengths) > 1 else lengths


def available(methods: list[str], attacks: list[str], objectives: list[str]) -> Value:
    """Which of these names the project has."""
    tables: list[tuple[list[str], Mapping[str, Any]]] = [
        (methods, {**PRUNERS, **STRATEGIES}),
        (attacks, ATTACKS),
        (objectives, OBJECTIVES),
    ]
    return [name for names, table in tables for name in names if name in table]


QUANTITIES: dict[str, Callable[..., Value]] = {
    function.__name__: function
    for function in (layer_counts, total_kept, size, multiply_adds, gamma, epochs, available)
}


def compute(what: str, arguments: Mapping[str, Any]) -> Value:
    """A quantity by its name."""
    if what not in QUANTITIES:
        raise RecipeError(unknown("quantity", what, QUANTITIES))
    return QUANTITIES[what](**arguments)


def _model(name: str) -> nn.Module:
    classes, shape = usual(name)
    return build(name, num_classes=classes, shape=shape)
