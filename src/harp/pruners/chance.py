"""Random masks: what any criterion must beat."""

from collections.abc import Mapping

from harp.allocate import allocate
from harp.pruners.base import Fixed, random_masks
from harp.units import Units


class Random(Fixed):
    """Keep weights drawn at random, at a strategy's rates; trained further, the masks stay."""

    passes = 0

    def __init__(
        self, units: Units, keep: float, strategy: str | Mapping[str, float] = "uniform", seed: int = 0
    ) -> None:
        counts = allocate(strategy, units, units.total(keep))
        super().__init__(units, random_masks(units, counts, seed), seed)
