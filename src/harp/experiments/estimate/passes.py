"""How many forward passes a step is worth: counted on a small network, true for a large one.

    operations of a step  =  images · passes · 2 · MACs of the network

A forward pass is one, its backward pass to the images one more, to the weights too two. So natural training takes 3,
PGD of 10 steps 23, Free-AT 3 for each replay. Methods that compute several losses take more, which is counted as it
is done: a stage of the recipe makes a step on a small network with the same objective and method.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harp.evaluation.predict import predicted
from harp.evaluation.runner import parts
from harp.experiments import build, recipe
from harp.experiments.estimate.counting import Counter, densely
from harp.experiments.estimate.known import Sizes
from harp.experiments.estimate.trial import operations_an_image
from harp.experiments.recipe import Recipe, Stage
from harp.pruning import macs

_SMALL = Sizes(64, 64, (3, 32, 32), 10)
_MODEL = "resnet8"
_KEEP = 0.2  # any budget will do, and one that every method can meet


class Passes:
    """Counts passes, each kind of step and each attack once."""

    def __init__(self) -> None:
        self._steps: dict[str, float] = {}
        self._attacks: dict[str, float] = {}
        self._macs: dict[str, int] = {}
        self.model: nn.Module = build.build(recipe.Model(name=_MODEL), _SMALL.noise(2, 2), None)
        self.macs: int = macs.cost(self.model, _SMALL.shape, {})["macs"]

    def of_step(self, made: Recipe, stage: Stage) -> float:
        """The passes of an image in a step of a stage."""
        # Budgets, rates and strategies change what is computed and not how often; switches and counts may.
        pruner = {key: value for key, value in stage.pruner.items() if key == "name" or isinstance(value, int)}
        objective, kind = made.stage_objective(stage), made.units.kind
        if pruner["name"] == "fixed":
            pruner, kind = {"name": "dense"}, "weights"  # masks cost nothing where all is computed densely
        key = json.dumps([objective, pruner, kind], sort_keys=True)
        if key not in self._steps:
            small = _small(objective, pruner, kind)
            with _quietly():
                self._steps[key] = operations_an_image(small, 0, _SMALL) / (2 * self.macs)
        return self._steps[key]

    def operations(self, made: Recipe, sizes: Sizes, number: int) -> float:
        """Those of a forward pass of one image before the stage of a number; channels that were cut do not count."""
        part = made.model
        key = f"{part.model_dump_json(exclude={'weights'})} {sizes.shape} {sizes.classes}"
        if key not in self._macs:
            model = part.build(sizes.classes, sizes.shape)
            self._macs[key] = macs.cost(model, sizes.shape, {})["macs"]
        pruned = [stage.pruner["keep"] for stage in made.stages[:number] if "keep" in stage.pruner]
        return 2.0 * self._macs[key] * (pruned[0] if pruned and made.units.kind == "channels" else 1.0)

    def of_attack(self, attack: Any) -> float:
        """The passes of an image that an attack does not fool, with one to classify what it found."""
        if attack is None:
            return 1.0
        key = repr(attack)
        if key not in self._attacks:
            steps = parts(attack, _SMALL.classes)
            if steps:
                self._attacks[key] = 1.0 + sum(2.0 * part.longest(_SMALL.classes) for part in steps)
            else:
                self._attacks[key] = 1.0 + self._counted(attack)
        return self._attacks[key]

    def _counted(self, attack: Any) -> float:
        x = torch.rand(2, *_SMALL.shape, generator=torch.Generator().manual_seed(0))
        y = predicted(self.model, x)
        with densely(), Counter() as counter:
            replace(attack, fast=False)(self.model, x, y)  # without what is prepared once for many images
        return float(counter.total) / (2 * len(x) * self.macs)


@contextmanager
def _quietly() -> Iterator[None]:
    """What the methods say of a few steps on noise is of no use to anybody."""
    log = logging.getLogger("harp")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _small(objective: Mapping[str, Any], pruner: Mapping[str, Any], kind: str) -> Recipe:
    budget = {} if pruner["name"] == "dense" else {"keep": _KEEP}
    content = {
        "name": "small",
        "data": {"name": "noise", "batch": 2, "augment": False},
        "model": _MODEL,
        "objective": dict(objective),
        "units": {"kind": kind},
        "stages": [{"name": "step", "pruner": {**pruner, **budget}, "epochs": 1}],
        "precision": "32-true",
    }
    return recipe.parse(content)
