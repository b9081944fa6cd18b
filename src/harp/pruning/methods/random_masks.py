"""Random masks: the baseline of every criterion."""

from collections.abc import Mapping

from torch import nn

from harp.pruning.allocation import allocate
from harp.pruning.methods.base import Fixed, as_units, random_masks
from harp.pruning.papers import Criterion, Taxonomy
from harp.pruning.units import Units


class Random(Fixed):
    """Keep random units, at a strategy's rates; the masks stay in further training.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: how many units each layer keeps: a name such as "uniform" or "lamp", or rates by layer.
        seed: of the random numbers.

    Example:
        masks = harp.Random(harp.Weights(model), keep=0.1, seed=1).masks()
    """

    title = "random masks"
    taxonomy = Taxonomy(Criterion.RANDOM)
    passes = 0

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] = "uniform",
        seed: int = 0,
    ) -> None:
        units = as_units(units)
        total = units.total(keep)
        super().__init__(units, random_masks(units, allocate(strategy, units, total), seed), seed)
        self.total = total  # the masks may cost a little less
