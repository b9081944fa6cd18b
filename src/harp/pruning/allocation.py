"""Allocation: how an integer budget is spread over the layers.

A strategy maps units and a total to one integer a layer; they respect every layer's limits, and where the budget
counts the units themselves they sum to it exactly. The literature's strategies give real numbers and round each on its
own, so that the sum is off by a few weights; here the rounding is by largest remainder, which gives the published
integers wherever those meet the budget. Other costs than the number of units are met from below: see `rounding.py`.

- `uniform`: the same rate everywhere.
- `erk`: Erdős-Rényi-Kernel (Evci et al., "Rigging the Lottery", 2020): counts in proportion to the sum of a weight's
  dimensions, layers that would exceed their size made dense and the rest scaled up. For units that are not weights,
  Erdős-Rényi rates: C units of fan-in F are kept in proportion to C (C + F) / (C F).
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

from harp.errors import RecipeError
from harp.pruning.rounding import flat, highest, nearest
from harp.pruning.units import Units, exact
from harp.system.nearest import unknown
from harp.system.numbers import brief

Strategy = Callable[[Units, int], list[int]]
_Floats = npt.NDArray[np.float64]


def _dimensions(units: Units, total: int) -> list[float]:
    """The sum of each weight's dimensions, or Erdős-Rényi rates."""
    if units.kind == "weights":  # a layer is a weight tensor, whose shape counts
        return [float(sum(weight.shape)) for weight in units.weights]
    return [(size + fan) / fan for size, fan in zip(units.sizes, units.fans, strict=True)]


def _ideal_gas(units: Units, total: int) -> list[float]:
    """n / (F n + 1) of a layer of n units, F chosen to meet the total: large layers end up equal."""
    return _gas_quotas(units, total, range(len(units.sizes)), _prices(units, total))


def _boosted(units: Units, total: int) -> list[float]:
    """The first and last layers dense within a fifth of the budget, and the rest by IGQ."""
    sizes = units.sizes
    if len(sizes) < 3:
        return _ideal_gas(units, total)
    prices = _prices(units, total)
    ends = float(sizes[0] * prices[0] + sizes[-1] * prices[-1])
    room = min(0.2 * total, ends)
    middle = _gas_quotas(units, total - room, range(1, len(sizes) - 1), prices)
    return [room * sizes[0] / ends, *middle, room * sizes[-1] / ends]


def _gas_quotas(units: Units, total: float, layers: range, prices: _Floats) -> list[float]:
    """IGQ over some of the layers."""
    limits = (units.sizes, units.lower, units.upper)
    sizes, lower, upper, price = (np.array(values, dtype=np.float64)[layers] for values in (*limits, prices))
    low, high = -40.0, 40.0  # log F
    for _ in range(200):
        middle = (low + high) / 2
        counts = sizes / (math.exp(middle) * sizes + 1)
        low, high = (middle, high) if (price * counts.clip(lower, upper)).sum() > total else (low, middle)
    return [float(count) for count in sizes / (math.exp(high) * sizes + 1)]


def _prices(units: Units, total: int) -> _Floats:
    """What a unit of each layer costs: where that depends on the other layers, at one rate for all.

    Each layer is charged rate · ∂cost/∂rate, scaled so that all together cost the total.
    """
    if exact(units):
        return np.ones(len(units.sizes))
    rate = units.uniform_rate(total)
    cost, slope = units.slope(np.full(len(units.sizes), rate))
    return np.asarray(slope / np.array(units.sizes) * (cost / (rate * slope).sum()))


PROPORTIONS: dict[str, Callable[[Units, int], Sequence[float]]] = {
    "uniform": lambda units, total: units.sizes,
    "erk": _dimensions,
    "igq": _ideal_gas,
    "boosted": _boosted,
}
"""The real-valued counts, up to a factor, of the strategies that have some."""


def _rounded(name: str) -> Strategy:
    return lambda units, total: nearest(PROPORTIONS[name](units, total), units, total)


uniform, erk, igq, boosted = map(_rounded, ("uniform", "erk", "igq", "boosted"))


def lamp(units: Units, total: int) -> list[int]:
    """Keep the highest LAMP scores: w² (‖w‖² of a channel) over the sum of those in the layer at least as large."""
    return highest([_lamp_scores(magnitudes) for magnitudes in _magnitudes(units)], units, total)


def blend(units: Units, total: int) -> list[int]:
    """Keep counts between uniform ones and LAMP's: the smaller the budget, the more like LAMP's.

    One rate for all leaves small layers too little only where little is kept at all; LAMP gives them more, and takes it
    from the widest layer even where no layer needs it. The uniform part is √(10 rate), so a third at 1 %, and half at
    most: a network of depthwise convolutions has layers that need more at any rate.
    """
    share = min(0.5, math.sqrt(10 * units.uniform_rate(total)))
    pairs = zip(uniform(units, total), lamp(units, total), strict=True)
    return nearest([share * even + (1 - share) * adapted for even, adapted in pairs], units, total)


def global_magnitude(units: Units, total: int) -> list[int]:
    """Keep the units of the whole network that are largest by their l2 norm."""
    return highest(_magnitudes(units), units, total)


def given(rates: Mapping[str, float]) -> Strategy:
    """Make a strategy of rates (or counts) by layer name, scaled to meet the total."""

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
"""The strategies that read the weights, and so need trained ones."""


def allocate(strategy: str | Mapping[str, float], units: Units, total: int) -> list[int]:
    """Spread `total` by a strategy's name or by given rates."""
    if not isinstance(strategy, str | Mapping):
        raise RecipeError(f"strategy {brief(strategy)}: one of {', '.join(STRATEGIES)}, or rates by layer")
    if not isinstance(strategy, str):
        return given(strategy)(units, total)
    if strategy not in STRATEGIES:
        raise RecipeError(unknown("strategy", strategy, STRATEGIES))
    return STRATEGIES[strategy](units, total)


def _magnitudes(units: Units) -> list[_Floats]:
    return [flat(norms) for norms in units.strength(units.weights, 2)]


def _lamp_scores(magnitudes: _Floats) -> _Floats:
    """LAMP's scores of one layer, ascending; float64 and summed from the small end of the tail.

    In float32, "total minus cumulative sum" is off by 0.7 % already at 2.4 million weights.
    """
    squares = np.sort(magnitudes) ** 2
    tails = np.cumsum(squares[::-1])[::-1]
    return np.asarray(np.divide(squares, tails, out=np.zeros_like(squares), where=tails > 0))
