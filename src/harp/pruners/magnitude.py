"""Pruning by magnitude, once: the baselines of every pruning paper.

Keep the largest weights of each layer and fine-tune. How many a layer keeps is the methods' only difference: one rate
for all (least weight magnitude, LWM), the largest weights of the whole network, or the rates of

    ERK    Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020
    LAMP   Lee et al., "Layer-adaptive Sparsity for the Magnitude-based Pruning", ICLR 2021

Departures: LAMP's authors prune in rounds of 20 % with training in between, and ERK belongs to a sparse training; here
both are one-shot rates on a trained network, as HARP's paper compares them.
"""

from collections.abc import Mapping

from harp.allocate import allocate
from harp.masks import top_k
from harp.pruners.base import Fixed
from harp.units import Units


class Magnitude(Fixed):
    """LWM: prune by magnitude at once, at a strategy's rates; trained further, the masks stay."""

    passes = 0

    def __init__(self, units: Units, keep: float, strategy: str | Mapping[str, float] = "uniform") -> None:
        counts = allocate(strategy, units, units.total(keep))
        weights = zip(units.names, units.weights, counts, strict=True)
        super().__init__(units, {name: top_k(weight.detach().abs(), count) for name, weight, count in weights})


class GlobalMagnitude(Magnitude):
    """Keep the largest weights of the whole network."""

    def __init__(self, units: Units, keep: float) -> None:
        super().__init__(units, keep, "global")


class Erk(Magnitude):
    """Prune by magnitude at ERK's rates."""

    def __init__(self, units: Units, keep: float) -> None:
        super().__init__(units, keep, "erk")


class Lamp(Magnitude):
    """LAMP: keep the weights that matter most relative to those of their layer that are at least as large."""

    def __init__(self, units: Units, keep: float) -> None:
        super().__init__(units, keep, "lamp")
