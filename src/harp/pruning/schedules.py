"""Schedules: the learning rate's factor as a function of progress from 0 to 1."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harp.errors import RecipeError
from harp.system.numbers import brief

Shape = Callable[[float], float]


def cosine(progress: float) -> float:
    """The learning rate's factor falls from 1 to 0 along half a cosine, step by step.

    The authors of HARP and HYDRA change it once an epoch and an epoch late: the last of 20 still has 2.4 % of it.

    Arguments:
        progress: the share of the training that is done.

    Example:
        harp.fit(model, batches, harp.Natural(), harp.Dense(units), epochs=1, schedule=harp.schedules.cosine)
    """
    return 0.5 * (1 + math.cos(math.pi * progress))


def constant(progress: float) -> float:
    """The learning rate stays.

    Arguments:
        progress: the share of the training that is done.

    Example:
        harp.fit(model, batches, harp.Natural(), harp.Dense(units), epochs=1, schedule=harp.schedules.constant)
    """
    return 1.0


def steps(at: Sequence[float] = (0.5, 0.75), factor: float = 0.1) -> Shape:
    """The learning rate is multiplied by `factor` at each of these shares of the training.

    Arguments:
        at: shares of the training, rising.
        factor: at each of them.

    Example:
        schedule = harp.schedules.steps([0.5, 0.75])
        harp.fit(model, batches, harp.Natural(), harp.Dense(units), epochs=1, schedule=schedule)
    """
    if list(at) != sorted(at) or not all(0 < share < 1 for share in at):
        raise RecipeError(f"schedule steps at {list(at)}: give rising shares between 0 and 1")
    return lambda progress: factor ** sum(progress >= share for share in at)


def sawtooth(periods: float = 10.0) -> Shape:
    """Within each period the learning rate falls to a tenth twice, then starts afresh: R-ADMM's.

    Arguments:
        periods: how many there are in a training.

    Example:
        schedule = harp.schedules.sawtooth(periods=2)
        harp.fit(model, batches, harp.Natural(), harp.Dense(units), epochs=1, schedule=schedule)
    """
    if periods < 1:
        raise RecipeError(f"schedule sawtooth with {periods:g} periods: give at least 1")
    return lambda progress: 0.1 ** int(3 * (progress * periods % 1))


SCHEDULES: dict[str, Callable[..., Shape]] = {
    "cosine": lambda: cosine,
    "constant": lambda: constant,
    "steps": steps,
    "sawtooth": sawtooth,
}


def as_schedule(schedule: Shape | str) -> Shape:
    """The schedule itself, or the one with a name such as `cosine`."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise RecipeError(f"schedule {schedule!r}: one of {', '.join(SCHEDULES)}, or a function of progress")
        return SCHEDULES[schedule]()
    advice = "give a function from progress (0 to 1) to the factor of the learning rate, like harp.schedules.cosine"
    try:
        first: Any = schedule(0.0)
    except TypeError as error:
        raise RecipeError(f"schedule {brief(schedule)}: {advice} or harp.schedules.steps([0.5])") from error
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        raise RecipeError(f"schedule {brief(schedule)} gives {brief(first)}: {advice}")
    return schedule


def from_recipe(part: Mapping[str, Any]) -> Shape:
    """The schedule that a recipe describes: its name and its options."""
    options = dict(part)
    return SCHEDULES[options.pop("name")](**options)
