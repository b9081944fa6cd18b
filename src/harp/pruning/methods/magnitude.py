"""Pruning by magnitude, once: the baselines of every pruning paper.

Keep the largest units of each layer and fine-tune. The methods differ only in how many a layer keeps: one rate for all
(least weight magnitude, LWM), the largest weights of the whole network, or the rates of

    ERK    Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020
    LAMP   Lee et al., "Layer-adaptive Sparsity for the Magnitude-based Pruning", ICLR 2021

The magnitude of a unit that masks several weights, such as a channel, is their l1 norm (Li et al., "Pruning Filters for
Efficient ConvNets", ICLR 2017); with a strategy that depends on the weights, both use the l2 norm.

Departures: LAMP's authors prune in rounds of 20 % with training in between, and ERK is part of a sparse training; here
a trained network is pruned once at their rates, as in HARP's comparison.
"""

from collections.abc import Mapping

from torch import nn

from harp.pruning.allocation import READS_WEIGHTS, allocate
from harp.pruning.methods.base import Fixed, as_units, largest
from harp.pruning.papers import Criterion, Locality, Paper, Taxonomy
from harp.pruning.units import Units


class Magnitude(Fixed):
    """LWM: prune by magnitude once, at a strategy's rates; the masks stay in further training.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: how many units each layer keeps: a name such as "uniform" or "lamp", or rates by layer.

    Example:
        masks = harp.Magnitude(harp.Weights(model), keep=0.1, strategy="erk").masks()
        harp.apply_masks(model, masks)
    """

    title = "least weight magnitude (LWM)"
    taxonomy = Taxonomy(Criterion.MAGNITUDE)
    passes = 0

    def __init__(
        self, units: Units | nn.Module, keep: float | str, strategy: str | Mapping[str, float] = "uniform"
    ) -> None:
        units = as_units(units)
        total = units.total(keep)
        counts = allocate(strategy, units, total)
        order = 2 if strategy in READS_WEIGHTS else 1
        super().__init__(units, largest(units, units.strength(units.weights, order), counts))
        self.total = total  # the masks may cost a little less


class GlobalMagnitude(Magnitude):
    """Keep the largest units of the whole network.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".

    Example:
        masks = harp.GlobalMagnitude(harp.Weights(model), keep=0.1).masks()
    """

    title = "the largest weights of the whole network"
    taxonomy = Taxonomy(Criterion.MAGNITUDE, Locality.GLOBAL)

    def __init__(self, units: Units | nn.Module, keep: float | str) -> None:
        super().__init__(units, keep, "global")


class Erk(Magnitude):
    """Prune by magnitude at ERK's rates.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".

    Example:
        masks = harp.Erk(harp.Weights(model), keep=0.1).masks()
    """

    title = "weight magnitude at ERK's rates"
    paper = Paper(
        "Rigging the Lottery: Making All Tickets Winners",
        ("Evci", "Gale", "Menick", "Castro", "Elsen"),
        "ICML",
        2020,
        "https://arxiv.org/abs/1911.11134",
    )
    taxonomy = Taxonomy(Criterion.MAGNITUDE, Locality.LOCAL)

    def __init__(self, units: Units | nn.Module, keep: float | str) -> None:
        super().__init__(units, keep, "erk")


class Lamp(Magnitude):
    """LAMP: keep the units that matter most relative to those of their layer that are at least as large.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".

    Example:
        masks = harp.Lamp(harp.Weights(model), keep=0.1).masks()
    """

    title = "weight magnitude at LAMP's rates"
    paper = Paper(
        "Layer-adaptive Sparsity for the Magnitude-based Pruning",
        ("Lee", "Park", "Mo", "Ahn", "Shin"),
        "ICLR",
        2021,
        "https://arxiv.org/abs/2010.07611",
    )
    taxonomy = Taxonomy(Criterion.MAGNITUDE, Locality.GLOBAL)

    def __init__(self, units: Units | nn.Module, keep: float | str) -> None:
        super().__init__(units, keep, "lamp")
