"""Random masks: what any criterion must beat."""

from collections.abc import Mapping

from harp.pruning.allocation import allocate
from harp.pruning.methods.base import Fixed, random_masks
from harp.pruning.papers import Criterion, Taxonomy
from harp.pruning.units import Units


class Random(Fixed):
    """Keep units drawn at random, at a strategy's rates; trained further, the masks stay.

    Arguments:
        units: what may be pruned: `harp.Weights` or `harp.Channels`.
        keep: the share of the budget's unit that is kept, above 0 and at most 1.
        strategy: how many units each layer keeps: a name such as "uniform" or "lamp", or rates by layer.
        seed: of what is drawn at random.

    Example:
        masks = harp.Random(harp.Weights(model), keep=0.1, seed=1).masks()
    """

    title = "random masks"
    taxonomy = Taxonomy(Criterion.RANDOM)
    passes = 0

    def __init__(
        self, units: Units, keep: float, strategy: str | Mapping[str, float] = "uniform", seed: int = 0
    ) -> None:
        total = units.total(keep)
        super().__init__(units, random_masks(units, allocate(strategy, units, total), seed), seed)
        self.total = total  # which the masks may not spend to the last
