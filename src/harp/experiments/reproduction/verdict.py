"""Verdicts: does a measured number agree with a published one, does an order hold?

A value is compared by intervals: the 95 % interval of our mean against the published value with its tolerance. An order
is judged by the 95 % interval of the difference, paired over seeds. With one seed only the interval over test images is
known, which leaves out the variation between trainings, so an order is open then.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harp.evaluation.confidence import interval, quantile

MOST_SEEDS = 50  # more seeds than this are not suggested


class State(StrEnum):
    """What can be said of a claim."""

    REPRODUCED = "reproduced"
    HOLDS = "order holds"
    HIGHER = "differs: higher"
    LOWER = "differs: lower"
    DIFFERS = "differs"
    CONTRADICTED = "order contradicted"
    OPEN = "open"
    NOT_RUN = "not run"
    NO_VALUE = "no published value"
    NO_VARIANT = "no small variant"


GOOD = (State.REPRODUCED, State.HOLDS)
BAD = (State.CONTRADICTED, State.LOWER, State.HIGHER, State.DIFFERS)


@dataclass(frozen=True)
class Verdict:
    """A state with its numbers in words."""

    state: State
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state}{': ' * bool(self.detail)}{self.detail}"


@dataclass(frozen=True)
class Measured:
    """A number with its 95 % interval, all in per cent."""

    mean: float
    low: float
    high: float
    seeds: int
    images: int  # of one seed

    def __str__(self) -> str:
        return f"{self.mean:.1f} ({self.low:.1f} to {self.high:.1f})"


def of_value(expected: float, tolerance: float, measured: Measured | None) -> Verdict:
    """Whether a measured number agrees with a published one."""
    if measured is None:
        return Verdict(State.NOT_RUN)
    low, high = expected - tolerance, expected + tolerance
    if low <= measured.low and measured.high <= high:
        return Verdict(State.REPRODUCED, str(measured))
    if measured.low > high or measured.high < low:
        return Verdict(State.HIGHER if measured.low > high else State.LOWER, str(measured))
    return Verdict(State.OPEN, f"{measured}, the interval and the tolerance overlap in part")


def of_order(ours: Sequence[float], theirs: Sequence[float], by: float = 0.0) -> Verdict:
    """Whether one method is ahead of another by `by` points; the numbers, in per cent, are paired by seed."""
    if not ours:
        return Verdict(State.NOT_RUN)
    differences = [first - second - by for first, second in zip(ours, theirs, strict=True)]
    mean, half = interval(differences)
    if math.isnan(half):
        return Verdict(State.OPEN, f"{mean + by:+.1f} points on one seed, which has no interval")
    text = f"{mean + by:+.1f} ± {half:.1f} points over {len(ours)} seeds"
    if mean - half > 0:
        return Verdict(State.HOLDS, text)
    if mean + half < 0:
        return Verdict(State.CONTRADICTED, text)
    return Verdict(State.OPEN, f"{text}, {_more_seeds(mean, differences)}")


def _more_seeds(mean: float, differences: Sequence[float]) -> str:
    """About how many more seeds would decide, if mean and spread stay as they are."""
    deviation = statistics.stdev(differences)
    for count in range(len(differences) + 1, MOST_SEEDS + 1):
        if abs(mean) > quantile(count - 1) * deviation / math.sqrt(count):
            return f"about {count - len(differences)} more seeds would decide"
    return f"more than {MOST_SEEDS} seeds would be needed"


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for a whole table: what is contradicted is said first, then what is open or missing."""
    states = [verdict.state for verdict in verdicts]
    if not states:
        return Verdict(State.NO_VALUE)
    good, bad = sum(state in GOOD for state in states), sum(state in BAD for state in states)
    missing = states.count(State.NOT_RUN)
    detail = f"{good} of {len(states)}"
    if missing == len(states):
        return Verdict(State.NOT_RUN)
    if bad:
        worst = next(state for state in BAD if state in states)
        return Verdict(worst, f"{bad} of {len(states)}, {detail} as published")
    if good == len(states):
        return Verdict(State.HOLDS if State.REPRODUCED not in states else State.REPRODUCED, detail)
    return Verdict(State.OPEN, f"{detail} as published, {missing} not run" if missing else f"{detail} as published")
