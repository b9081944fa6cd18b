"""Least weight magnitude (LWM): the baseline of every pruning paper.

Keep the largest weights of each layer, once, and fine-tune. How many a layer keeps is any strategy's: `lamp` gives
the pruning method of Lee et al. (2021) in one shot, `global` plain global magnitude pruning.
"""

from collections.abc import Mapping

from harp.allocate import allocate
from harp.masks import top_k
from harp.pruners.base import Fixed
from harp.units import Units


class Magnitude(Fixed):
    """Prune by magnitude at once; trained further, the masks stay."""

    passes = 0

    def __init__(self, units: Units, keep: float, strategy: str | Mapping[str, float] = "uniform") -> None:
        counts = allocate(strategy, units, units.total(keep))
        weights = zip(units.names, units.weights, counts, strict=True)
        super().__init__(units, {name: top_k(weight.detach().abs(), count) for name, weight, count in weights})
