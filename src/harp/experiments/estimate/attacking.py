"""What an attack of the evaluation takes for an image, from a few images and a few steps.

An attack in steps lets an image go as soon as it is fooled, so what it takes depends on how robust the network is. It
is measured on images that hold out, in a ball too small to fool anybody: that is the most that an image can take.
"""

import statistics
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harp.attacks.batched import Packing, Stepwise
from harp.attacks.fast_forward import frozen
from harp.evaluation.predict import predicted
from harp.evaluation.runner import parts

_TINY = 1e-6  # no answer changes in so small a ball
_TICKS = 5  # steps that are timed


class _Enough(Exception):
    """Enough steps were timed."""


def seconds_an_image(model: nn.Module, attack: Any, x: Tensor, classes: int, passing: float) -> tuple[float, bool]:
    """The seconds that an attack takes for an image, and whether images that are fooled take less.

    `passing` are those of a forward pass of one image: what would take long is measured by fewer steps.
    """
    y = predicted(model, x)
    if attack is None:
        return _timed(lambda: predicted(model, x)) / len(x), False
    steps = parts(attack, classes)
    if steps:
        return sum(_stepwise(model, part, x, y, classes) for part in steps), True
    runs, steps_of_one = getattr(attack, "restarts", 1), getattr(attack, "steps", 1)
    if steps_of_one <= 3 or 3 * passing * runs * steps_of_one * len(x) < 1.0:
        return _timed(lambda: attack(model, x, y)) / len(x), runs > 1
    once = {"restarts": 1} if hasattr(attack, "restarts") else {}
    one, three = (_timed(lambda n=n: replace(attack, steps=n, **once)(model, x, y)) for n in (1, 3))
    return runs * (one + (steps_of_one - 1) * max(0.0, three - one) / 2) / len(x), runs > 1


def _timed(work: Any) -> float:
    """The seconds of the second time: the first one prepares."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _stepwise(model: nn.Module, part: Stepwise, x: Tensor, y: Tensor, classes: int) -> float:
    """The seconds of an image that is never fooled: so many of its steps as it takes."""
    tiny: Stepwise = replace(part, epsilon=_TINY)  # type: ignore[type-var]  # all of them are dataclasses
    stamps: list[float] = []

    def after_step() -> None:
        stamps.append(time.perf_counter())
        if len(stamps) > _TICKS + 1:
            raise _Enough

    with torch.inference_mode(False), torch.no_grad(), frozen(model, x, fast=part.fast) as net:
        packing = Packing(tiny, net, x, y, batch=len(x), seed=0)
        stamps.append(time.perf_counter())
        with suppress(_Enough):
            packing.run(after_step)
    times = [later - earlier for earlier, later in pairwise(stamps)][1:]  # the first one prepares
    return part.longest(classes) * statistics.median(times) / len(x) if times else 0.0
