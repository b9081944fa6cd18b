"""The time that an attack of the evaluation takes for an image, from a few images and a few steps.

An attack in steps drops an image as soon as it is fooled, so its time depends on how robust the network is. It is
measured inside a ball that is too small to fool anything: that is the longest time that an image can take.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harp.attacks.batched import Packing, Stepwise
from harp.attacks.fast_forward import frozen
from harp.evaluation.predict import predicted
from harp.evaluation.runner import parts

_TINY = 1e-6  # no prediction changes inside so small a ball
_STEPS = 5  # steps that are timed


class _Enough(Exception):
    """Enough steps were timed."""


def seconds_an_image(model: nn.Module, attack: Any, x: Tensor, classes: int, one_pass: float) -> tuple[float, bool]:
    """The seconds that an attack takes for an image, and whether fooled images take less.

    `one_pass` is the time of a forward pass of one image: a long attack is measured by fewer steps.
    """
    y = predicted(model, x)
    if attack is None:
        return _timed(lambda: predicted(model, x)) / len(x), False
    stepwise = parts(attack, classes)
    if stepwise:
        return sum(_stepwise(model, part, x, y, classes) for part in stepwise), True
    restarts, steps = getattr(attack, "restarts", 1), getattr(attack, "steps", 1)
    if steps <= 3 or 3 * one_pass * restarts * steps * len(x) < 1.0:
        return _timed(lambda: attack(model, x, y)) / len(x), restarts > 1
    once = {"restarts": 1} if hasattr(attack, "restarts") else {}
    one, three = (_timed(partial(replace(attack, steps=n, **once), model, x, y)) for n in (1, 3))
    return restarts * (one + (steps - 1) * max(0.0, three - one) / 2) / len(x), restarts > 1


def _timed(work: Callable[[], object]) -> float:
    """The seconds of the second call: the first one warms up."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _stepwise(model: nn.Module, part: Stepwise, x: Tensor, y: Tensor, classes: int) -> float:
    """The seconds of an image that is never fooled: the time of a step, times the most steps."""
    tiny: Stepwise = replace(part, epsilon=_TINY)  # type: ignore[type-var]  # all of them are dataclasses
    stamps: list[float] = []

    def after_step() -> None:
        stamps.append(time.perf_counter())
        if len(stamps) > _STEPS + 1:
            raise _Enough

    with torch.inference_mode(False), torch.no_grad(), frozen(model, x, fast=part.fast) as net:
        packing = Packing(tiny, net, x, y, batch=len(x), seed=0)
        stamps.append(time.perf_counter())
        with suppress(_Enough):
            packing.run(after_step)
    times = [later - earlier for earlier, later in pairwise(stamps)][1:]  # the first one warms up
    return part.longest(classes) * statistics.median(times) / len(x) if times else 0.0
