"""Rounding: from real counts, or from scores, to one whole number a layer within a budget.

Where the budget counts the units themselves, the numbers sum to it exactly. Any other cost (MACs, or the FLOPs of
channels, where the price of one layer's units depends on its neighbours') is met from below: the result is maximal, no
layer could take another step without exceeding the budget or its own limit. All that is needed of the cost is that it
never falls when a count grows. So a layer that does not fit once will never fit again, and can be left out.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from harp.errors import BudgetError
from harp.pruning.units import Units, exact

_Floats = npt.NDArray[np.float64]

_INFINITE = int(np.float64(np.inf).view(np.int64))


def nearest(counts: Sequence[float] | _Floats, units: Units, total: int) -> list[int]:
    """The integers nearest to desired counts that meet the total and every layer's limits.

    All counts are scaled by one factor until the clipped ones cost the total: of all feasible counts these have the
    least relative entropy to the desired ones where each unit costs the same, and feasible counts are only rounded.
    Otherwise they are rounded to whole steps while they are scaled, and what is left goes to the largest remainders.
    """
    if exact(units):
        return round_to(scale_to(counts, units, total), units, total)
    desired = _positive(counts).tolist()

    def propose(factor: float) -> list[int]:
        return [_rounded(units, layer, factor * count) for layer, count in enumerate(desired)]

    def order(factor: float, chosen: list[int]) -> list[float]:
        return [(factor * count - have) / step for count, have, step in zip(desired, chosen, units.steps, strict=True)]

    return _fill(units, total, propose, order, _largest_factor)


def _positive(counts: Sequence[float] | _Floats) -> _Floats:
    """Counts above zero: a layer of which nothing is desired still takes part when the others are full."""
    return np.maximum(np.asarray(counts, dtype=np.float64), 1e-12)


def _largest_factor(fits: Callable[[float], bool]) -> float:
    low, high = 1e-30, 1e30  # nothing, and everything, of any counts
    for _ in range(64):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scale_to(counts: Sequence[float] | _Floats, units: Units, total: int) -> _Floats:
    """Scale counts by one factor and clip them to their limits so that they cost the total; real numbers."""
    lower, upper = np.array(units.lower, dtype=np.float64), np.array(units.upper, dtype=np.float64)
    _check(units, total, units.spend(units.lower))
    desired, sizes = _positive(counts), np.array(units.sizes)

    def clipped(factor: float) -> _Floats:
        return np.asarray((factor * desired).clip(lower, upper))

    if not exact(units):
        return clipped(_largest_factor(lambda factor: units.slope(clipped(factor) / sizes)[0] <= total))
    # The clipped sum is piecewise linear in the factor, with a kink where a layer leaves or reaches a limit.
    kinks = np.unique(np.concatenate([lower / desired, upper / desired]))
    sums = np.array([clipped(kink).sum() for kink in kinks])
    segment = int(np.searchsorted(sums, total))
    if segment == 0:
        return lower
    left, right = segment - 1, min(segment, len(kinks) - 1)
    rise = sums[right] - sums[left]
    share = (total - sums[left]) / rise if rise > 0 else 0.0
    return clipped(kinks[left] + share * (kinks[right] - kinks[left]))


def round_to(counts: _Floats, units: Units, total: int) -> list[int]:
    """Round counts that sum to the total by largest remainder; ties go to the layer that comes first."""
    floors = np.floor(counts + 1e-9).astype(np.int64)
    remainders = counts - floors
    missing = total - int(floors.sum())
    order = np.argsort(-remainders, kind="stable") if missing > 0 else np.argsort(remainders, kind="stable")
    step = 1 if missing > 0 else -1
    bounds = units.upper if missing > 0 else units.lower
    while missing:
        for layer in order:
            if missing and floors[layer] != bounds[layer]:
                floors[layer] += step
                missing -= step
    return [int(count) for count in floors]


def highest(scores: Sequence[_Floats], units: Units, total: int) -> list[int]:
    """Count per layer the best scores of all layers that the total pays for, within limits; none is negative."""
    if exact(units):
        return best(scores, units.lower, units.upper, total)
    ranked = [np.sort(layer) for layer in scores]

    def propose(threshold: float) -> list[int]:
        above = (len(layer) - int(np.searchsorted(layer, threshold)) for layer in ranked)
        return [_floored(units, layer, count) for layer, count in enumerate(above)]

    def order(threshold: float, chosen: list[int]) -> list[float]:
        following = (_next(units, layer, count) for layer, count in enumerate(chosen))
        return [-1.0 if count is None else float(layer[-count]) for layer, count in zip(ranked, following, strict=True)]

    def bisect(fits: Callable[[float], bool]) -> float:
        low, high = -1, _INFINITE  # the bits of floats that are not negative sort as the floats do
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(float(np.int64(middle).view(np.float64))) else (middle, high)
        return float(np.int64(high).view(np.float64))

    return _fill(units, total, propose, order, bisect)


def best(scores: Sequence[_Floats], lower: Sequence[int], upper: Sequence[int], total: int) -> list[int]:
    """Count per layer the `total` best scores of all layers, within limits; of equal ones the first layer's."""
    candidates = []
    for layer, low, high in zip(scores, lower, upper, strict=True):
        leading = np.sort(layer)[::-1][:high].copy()
        leading[:low] = np.inf
        candidates.append(leading)
    everything = np.concatenate(candidates)
    threshold = np.partition(everything, len(everything) - total)[len(everything) - total]
    counts = [int((layer > threshold).sum()) for layer in candidates]
    for i, layer in enumerate(candidates):
        counts[i] += min(total - sum(counts), int((layer == threshold).sum()))
    return counts


def flat(tensor: Tensor) -> _Floats:
    """A tensor's values as the functions here take them."""
    values: _Floats = tensor.detach().double().reshape(-1).cpu().numpy()
    return values


def _fill(
    units: Units,
    total: int,
    propose: Callable[[float], list[int]],
    order: Callable[[float, list[int]], list[float]],
    bisect: Callable[[Callable[[float], bool]], float],
) -> list[int]:
    """Raise counts as far as a common setting allows, then one step each in an order, until no layer fits any more.

    `propose` gives the counts of a setting, `bisect` the most generous setting that fits, and `order` says which layer
    comes first for the next step: that of the largest number.
    """
    counts = [_floored(units, layer, 0) for layer in range(len(units.sizes))]
    _check(units, total, units.spend(counts))
    growing = list(range(len(counts)))

    def raised(setting: float) -> list[int]:
        proposed = propose(setting)
        return [max(count, proposed[i]) if i in growing else count for i, count in enumerate(counts)]

    def fits(setting: float) -> bool:
        return units.spend(raised(setting)) <= total

    while growing:
        setting = bisect(fits)
        counts = raised(setting)
        urgency = order(setting, counts)
        for layer in sorted(growing, key=lambda i: (-urgency[i], i)):
            following = _next(units, layer, counts[layer])
            larger = [following or count if i == layer else count for i, count in enumerate(counts)]
            if following is not None and units.spend(larger) <= total:
                counts = larger
            else:
                growing.remove(layer)
    return counts


def _check(units: Units, total: int, least: int) -> None:
    most = units.spend(units.upper)
    if not least <= total <= most:
        raise BudgetError(f"a total of {total:,} is outside the layers' limits {least:,} to {most:,}")


def _floored(units: Units, layer: int, count: float) -> int:
    """The largest number of whole steps within the layer's limits that is not above a count, or the smallest."""
    size, step, low, high = units.sizes[layer], units.steps[layer], units.lower[layer], units.upper[layer]
    smallest = min(-(-low // step) * step, size)
    if smallest > high:
        raise BudgetError(f"layer {units.names[layer]!r} can't keep a multiple of {step} between {low} and {high}")
    if count >= size and high >= size:
        return size
    return max(smallest, int(min(count, high)) // step * step)


def _next(units: Units, layer: int, count: int) -> int | None:
    """One step more, or all of the layer; None beyond its limit."""
    following = min(count + units.steps[layer], units.sizes[layer])
    return following if count < following <= units.upper[layer] else None


def _rounded(units: Units, layer: int, count: float) -> int:
    """The number of whole steps within the limits that is nearest to a count, the larger one of two."""
    below = _floored(units, layer, count)
    above = _next(units, layer, below)
    return below if above is None or count - below < (above - below) / 2 else above
