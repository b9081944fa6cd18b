"""Random masks: what any criterion must beat."""

from collections.abc import Mapping

from harp.allocate import allocate
from harp.pruners.base import Fixed, random_masks
from harp.units import Units


class Random(Fixed):
    """Keep units drawn at random, at a strategy's rates; trained further, the masks stay."""

    passes = 0

    def __init__(
        self, units: Units, keep: float, strategy: str | Mapping[str, float] = "uniform", seed: int = 0
    ) -> None:
        total = units.total(keep)
        super().__init__(units, random_masks(units, allocate(strategy, units, total), seed), seed)
        self.total = total  # which the masks may not spend to the last
