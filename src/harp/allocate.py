"""Allocation: how an integer budget is spread over the layers.

A strategy maps units and a total to one integer a layer; they sum to the total exactly and respect every layer's
limits. The literature's strategies name real numbers and round each on its own, so that the sum is off by a few
weights; here the rounding is by largest remainder, which gives the published integers wherever those meet the budget.

- `uniform`: the same rate everywhere.
- `erk`: Erdős-Rényi-Kernel (Evci et al., "Rigging the Lottery", 2020): counts in proportion to the sum of a weight's
  dimensions, layers that would exceed their size made dense and the rest scaled up.
- `lamp`: Lee et al., "Layer-adaptive sparsity for the magnitude-based pruning", 2021.
- `global_magnitude`: the largest weights of the whole network.
- `igq`: ideal gas quotas (Chen et al., "Sparsity Winning Twice", 2022): k = n / (F n + 1).
- `boosted`: IGQ, but the first and the last layer stay dense while they take at most a fifth of the budget. HARP's
  published rates look like that: they spend 19 % of VGG16's budget at 99.9 %, 20 % of ResNet50's at 99 % on these two.
- `blend`: our own, between `uniform` and `lamp`, the more of the latter the smaller the budget.
- `given`: rates or counts by layer name.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from harp.errors import BudgetError, RecipeError
from harp.units import Units

Strategy = Callable[[Units, int], list[int]]
_Floats = npt.NDArray[np.float64]


def uniform(units: Units, total: int) -> list[int]:
    """Keep the same share of every layer."""
    return nearest(units.sizes, units, total)


def erk(units: Units, total: int) -> list[int]:
    """Keep counts in proportion to the sum of each weight's dimensions."""
    return nearest(_dimensions(units, total), units, total)


def igq(units: Units, total: int) -> list[int]:
    """Keep n / (F n + 1) of a layer of n weights, F chosen to meet the total: large layers end up equal."""
    return nearest(_gas(units, total), units, total)


def boosted(units: Units, total: int) -> list[int]:
    """Keep the first and last layers dense within a fifth of the budget, and spread the rest by IGQ."""
    return nearest(_boosted(units, total), units, total)


def _dimensions(units: Units, total: int) -> list[float]:
    return [float(sum(weight.shape)) for weight in units.weights]


def _gas(units: Units, total: int) -> list[float]:
    return _ideal_gas(units, total, range(len(units.sizes)))


def _ideal_gas(units: Units, total: float, layers: Sequence[int]) -> list[float]:
    """IGQ over some of the layers."""
    sizes, lower, upper = (np.array(values, dtype=np.float64)[list(layers)] for values in _limits(units))
    low, high = -40.0, 40.0  # log F
    for _ in range(200):
        middle = (low + high) / 2
        counts = sizes / (math.exp(middle) * sizes + 1)
        low, high = (middle, high) if counts.clip(lower, upper).sum() > total else (low, middle)
    return [float(count) for count in sizes / (math.exp(high) * sizes + 1)]


def _limits(units: Units) -> tuple[list[int], list[int], list[int]]:
    return units.sizes, units.lower, units.upper


def _boosted(units: Units, total: int) -> list[float]:
    sizes = units.sizes
    if len(sizes) < 3:
        return _gas(units, total)
    ends = sizes[0] + sizes[-1]
    room = min(0.2 * total, float(ends))
    middle = _ideal_gas(units, total - room, range(1, len(sizes) - 1))
    return [room * sizes[0] / ends, *middle, room * sizes[-1] / ends]


def lamp(units: Units, total: int) -> list[int]:
    """Keep the highest LAMP scores: w² over the sum of all squares in the layer that are at least as large."""
    return best([_lamp_scores(weight) for weight in _magnitudes(units)], units.lower, units.upper, total)


def blend(units: Units, total: int) -> list[int]:
    """Keep counts between uniform ones and LAMP's: the smaller the budget, the more like LAMP's.

    One rate for all starves small layers only where little is kept at all; LAMP feeds them, and takes it from the
    widest layer even where nobody starves. The uniform part is √(10 rate), so all at 10 % and a third at 1 %.
    """
    share = evenness(total / sum(units.sizes))
    pairs = zip(uniform(units, total), lamp(units, total), strict=True)
    return nearest([share * even + (1 - share) * fed for even, fed in pairs], units, total)


def evenness(rate: float) -> float:
    """How far a budget is from starving anybody, between 0 and 1: √(10 rate), at most 1."""
    return math.sqrt(min(1.0, 10 * rate))


def global_magnitude(units: Units, total: int) -> list[int]:
    """Keep the largest weights of the whole network."""
    return best(_magnitudes(units), units.lower, units.upper, total)


def given(rates: Mapping[str, float]) -> Strategy:
    """Make a strategy of the rates (or counts) that somebody names, scaled to meet the total."""

    def strategy(units: Units, total: int) -> list[int]:
        unknown, missing = set(rates) - set(units.names), set(units.names) - set(rates)
        if unknown or missing:
            wrong = f"unknown layer {min(unknown)!r}" if unknown else f"no rate for layer {min(missing)!r}"
            raise RecipeError(f"given strategy: {wrong}; it must name each of the {len(units.names)} layers once")
        values = [rates[name] for name in units.names]
        if min(values) < 0 or not np.isfinite(values).all():
            raise RecipeError(f"given strategy: rate {min(values):.6g}; rates must be positive numbers")
        if max(values) <= 1:
            values = [value * size for value, size in zip(values, units.sizes, strict=True)]
        return nearest(values, units, total)

    return strategy


STRATEGIES: dict[str, Strategy] = {
    "uniform": uniform,
    "erk": erk,
    "lamp": lamp,
    "global": global_magnitude,
    "igq": igq,
    "boosted": boosted,
    "blend": blend,
}


READS_WEIGHTS = ("lamp", "global", "blend")
"""The strategies that look at the weights, and so want trained ones."""

WISHES: dict[str, Callable[[Units, int], Sequence[float]]] = {
    "uniform": lambda units, total: units.sizes,
    "erk": _dimensions,
    "igq": _gas,
    "boosted": _boosted,
}
"""The real-valued counts, up to a factor, of the strategies that have some."""


def allocate(strategy: str | Mapping[str, float], units: Units, total: int) -> list[int]:
    """Spread `total` by a strategy's name or by given rates."""
    if not isinstance(strategy, str):
        return given(strategy)(units, total)
    if strategy not in STRATEGIES:
        raise RecipeError(f"unknown strategy {strategy!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy](units, total)


def nearest(counts: Sequence[float] | _Floats, units: Units, total: int) -> list[int]:
    """The integers nearest to wished counts that meet the total and every layer's limits.

    All counts are scaled by one factor until the clipped ones sum to the total: of all feasible counts these have the
    least relative entropy to the wish, and where the wish is feasible it is only rounded.
    """
    return round_to(scale_to(counts, units, total), units, total)


def scale_to(counts: Sequence[float] | _Floats, units: Units, total: int) -> _Floats:
    """Scale counts by one factor and clip them to their limits so that they sum to the total; real numbers."""
    wish = np.asarray(counts, dtype=np.float64)
    lower, upper = np.array(units.lower, dtype=np.float64), np.array(units.upper, dtype=np.float64)
    if not lower.sum() <= total <= upper.sum():
        raise BudgetError(
            f"a total of {total:,} is outside the layers' limits {lower.sum():,.0f} to {upper.sum():,.0f}"
        )
    wish = np.maximum(wish, 1e-12)  # a wish of nothing still lets a layer take part when the others are full
    # The clipped sum is piecewise linear in the factor, with a kink where a layer leaves or reaches a limit.
    kinks = np.unique(np.concatenate([lower / wish, upper / wish]))
    sums = np.array([(kink * wish).clip(lower, upper).sum() for kink in kinks])
    segment = int(np.searchsorted(sums, total))
    if segment == 0:
        return lower
    left, right = segment - 1, min(segment, len(kinks) - 1)
    rise = sums[right] - sums[left]
    share = (total - sums[left]) / rise if rise > 0 else 0.0
    return np.asarray(((kinks[left] + share * (kinks[right] - kinks[left])) * wish).clip(lower, upper))


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


def _magnitudes(units: Units) -> list[_Floats]:
    return [flat(weight.detach().abs()) for weight in units.weights]


def _lamp_scores(magnitudes: _Floats) -> _Floats:
    """LAMP's scores of one layer, ascending; float64 and summed from the small end of the tail.

    In float32, "total minus cumulative sum" is off by 0.7 % already at 2.4 million weights.
    """
    squares = np.sort(magnitudes) ** 2
    tails = np.cumsum(squares[::-1])[::-1]
    return np.asarray(np.divide(squares, tails, out=np.zeros_like(squares), where=tails > 0))


def best(scores: Sequence[_Floats], lower: Sequence[int], upper: Sequence[int], total: int) -> list[int]:
    """Count per layer the `total` best scores of all layers, within limits; of equal ones the first layer's."""
    candidates = []
    for layer, low, high in zip(scores, lower, upper, strict=True):
        highest = np.sort(layer)[::-1][:high].copy()
        highest[:low] = np.inf
        candidates.append(highest)
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
