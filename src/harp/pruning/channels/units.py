"""Channels: units of structured pruning, found in any model that runs.

Every channel space is a layer of units. Masks act on the *input* channels of all weights that read a space, so a
pruned channel is simply unread: norms and biases need no special case, and cutting it out afterwards changes nothing.
"""

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from harp.errors import ModelError, RecipeError
from harp.models.inputs import Inputs, ask, copied, described, first_rows, tensors
from harp.models.modes import untouched
from harp.pruning.channels.cutting import Cut, plan
from harp.pruning.channels.forward import first_line
from harp.pruning.channels.latency import NOUN, Latency, measure
from harp.pruning.channels.prices import TARIFFS, Tariff, tariff
from harp.pruning.channels.spaces import Places, Space, Whole, spaces
from harp.pruning.channels.tracing import trace
from harp.pruning.channels.verify import TOLERANCE, Trial, difference
from harp.pruning.masks import Masks
from harp.pruning.prunable import check_patterns, check_readable, limits, matches
from harp.pruning.units import checked_total
from harp.system.nearest import unknown
from harp.system.numbers import brief

logger = logging.getLogger("harp")
_Floats = npt.NDArray[np.float64]


class Channels:
    """Whole channels of a model, under a budget of FLOPs, MACs, parameters, memory or time.

    The model is run on `example` to follow its channels. Channels that can only be removed together are one unit, and
    what can't be pruned safely is left whole: `whole` says what, and why.

    Arguments:
        model: any `nn.Module` whose graph can be followed.
        example: one or two images of the kind to come; or whatever else the model takes: a tuple of tensors is several
            arguments, a dict is named ones.
        budget: what `keep` is a share of: `flops` (as the paper counts them), `macs`, `parameters` or `memory`; or
            `latency`, the time for one image, measured now; or times that were measured before.
        ignore: patterns of weights that stay as they are, with all channels that they read and give.
        minimum, maximum: per pattern of a reading weight, the share of its channels that must / may be kept.
        multiple: keep a multiple of so many channels of each space, as some hardware wants it; or all.
        whole_ends: leave what the first weight gives and what the last one reads as they are.

    Example:
        units = harp.Channels(model, images[:2], budget="flops")
        pruner = harp.Magnitude(units, keep=0.5)
        small = units.slim(model, pruner.finish())
    """

    kind = "channels"
    initial_rate = 1.0
    gamma_step = 0.02

    def __init__(
        self,
        model: nn.Module,
        example: Inputs,
        *,
        budget: str | Latency = "flops",
        ignore: Sequence[str] = (),
        minimum: Mapping[str, float] | None = None,
        maximum: Mapping[str, float] | None = None,
        multiple: int = 1,
        whole_ends: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module) or not tensors(example):
            raise ModelError(f"channels of {brief(model)} on {brief(example)}: give an nn.Module and a batch of images")
        if isinstance(budget, str) and budget not in (*TARIFFS, "latency"):
            raise RecipeError(unknown("budget of channels", budget, [*TARIFFS, "latency"]))
        if multiple < 1:
            raise RecipeError(f"multiple {multiple}: give 1 for any number of channels, or 8, 16, ...")
        check_patterns([*ignore, *(minimum or {}), *(maximum or {})], model)
        self.model, self.example = model, _fitting(model, example)
        example = self.example
        self.trace = trace(model, example)
        candidates, self.whole = spaces(self.trace)
        candidates = [space for space in candidates if not self._spared(space, ignore, whole_ends)]
        self.spaces, failed = Trial(model, example, self.trace).survivors(candidates)
        self.whole += failed
        if not self.spaces:
            reasons = "; ".join(dict.fromkeys(part.reason for part in self.whole))
            raise ModelError(f"{type(model).__name__} has no channels that can be pruned: {reasons}")
        for reason in dict.fromkeys(part.reason for part in failed):
            parts = [part for part in failed if part.reason == reason]
            channels = sum(part.count for part in parts)
            logger.warning("%d channels stay (first reader %s): %s", channels, parts[0].readers[0], reason)
        self.names = [space.name for space in self.spaces]
        self.sizes = [len(space.atoms) for space in self.spaces]
        readers = [space.readers[0] for space in self.spaces]
        self.floors, self.ceilings, self.lower, self.upper = limits(readers, self.sizes, minimum, maximum, self.kind)
        self.steps = [min(multiple, size) for size in self.sizes]
        self.places = Places(self.trace, self.spaces)
        self.masked = [place.name for place in self.places.readers]
        axes = {place.name: place.axis for place in reversed(self.places.readers)}
        shapes = {name: model.get_parameter(name).shape for name in readers}
        self.fans = [shapes[name][axes[name]] * math.prod(shapes[name][2:]) for name in readers]
        if budget == "latency":
            if not isinstance(example, Tensor):
                raise ModelError(f"times are measured on a tensor of images, not on {described(example)}")
            budget = measure(model, example, self.trace, self.spaces)
        self.latency = budget if isinstance(budget, Latency) else None
        self.noun = NOUN if isinstance(budget, Latency) else TARIFFS[budget][1]
        self.tariff = self.priced(budget)
        self.size = self.tariff.exact(self.sizes)

    def priced(self, budget: str | Latency) -> Tariff:
        """What channels cost under a budget, this one or another."""
        if isinstance(budget, Latency):
            return tariff(self.trace, self.spaces, budget.products(self.trace))
        return tariff(self.trace, self.spaces, TARIFFS[budget][0](self.model, self.trace))

    def _spared(self, space: Space, ignore: Sequence[str], whole_ends: bool) -> bool:
        """Whether a space stays on request."""
        names = [*space.readers, *space.givers]
        ends = {self.trace.uses[0].name} & set(space.givers) or {self.trace.uses[-1].name} & set(space.readers)
        reason = "ignored on request" if any(matches(n, p) for n in names for p in ignore) else ""
        reason = reason or ("one of the two ends, which stay on request" if whole_ends and ends else "")
        if reason:
            self.whole.append(Whole(space.readers, len(space.atoms), reason))
        return bool(reason)

    def __repr__(self) -> str:
        """What there is to prune, in a line."""
        counts = f"{sum(self.sizes):,} channels in {len(self.names)} groups of {type(self.model).__name__}"
        return f"Channels({counts}, {self.size:,} {self.noun})"

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights that read the spaces, looked up afresh."""
        return [self.model.get_parameter(name) for name in self.masked]

    def total(self, keep: float | str) -> int:
        """The integer budget: `keep` times what the whole network costs, rounded, checked against the limits."""
        return checked_total(self, keep)

    def cost(self, rates: Tensor) -> Tensor:
        """The cost at these rates."""
        return self.tariff.soft(rates * torch.tensor(self.sizes, dtype=rates.dtype, device=rates.device))

    def slope(self, rates: _Floats) -> tuple[float, _Floats]:
        """The cost at these rates and its gradient."""
        sizes = np.array(self.sizes, dtype=np.float64)
        cost, gradient = self.tariff.slope(rates * sizes)
        return cost, gradient * sizes

    def counts(self, rates: Sequence[float]) -> list[int]:
        """The rounded number of channels of each space, within its limits."""
        counts = []
        for rate, size, low, high, step in zip(rates, self.sizes, self.lower, self.upper, self.steps, strict=True):
            count = round(rate * size) if step == 1 else min(size, step * round(rate * size / step))
            counts.append(max(low, min(count, high)))
        return counts

    def spend(self, counts: Sequence[int]) -> int:
        """The exact cost of keeping so many channels of each space."""
        return self.tariff.exact(counts)

    def spent(self, masks: Mapping[str, Tensor]) -> int:
        """The exact cost of the network once the channels are cut out that these masks leave unread."""
        return self.spend([int(alive.sum()) for alive in self.alive(masks)])

    def alive(self, masks: Mapping[str, Tensor]) -> list[Tensor]:
        """For each space, which channels are read under these masks."""
        return list(torch.split(self.places.read(masks), self.sizes))

    def uniform_rate(self, total: int) -> float:
        """The rate of all spaces at which so much is spent."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.slope(np.full(len(self.sizes), middle))[0] <= total else (low, middle)
        return low

    def strength(self, values: Sequence[Tensor], order: int) -> list[Tensor]:
        """For each space, the norm of all that each of its channels is multiplied by."""
        sums = self._sum([value.detach().abs() ** order for value in values])
        return [part ** (1 / order) for part in torch.split(sums, self.sizes)]

    def gather(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient on a channel's mask: the sum over all that it masks."""
        if all(gradient is None for gradient in gradients):
            return [None] * len(self.sizes)
        return list(torch.split(self._sum(gradients), self.sizes))

    def _sum(self, values: Sequence[Tensor | None]) -> Tensor:
        some = next(value for value in values if value is not None)
        sums = torch.zeros(sum(self.sizes) + 1, dtype=some.dtype, device=some.device)
        for value, (_, axis, channels) in zip(values, self.places.readers, strict=True):
            if value is not None:
                others = [other for other in range(value.ndim) if other != axis]
                sums.index_add_(0, (channels % len(sums)).to(some.device), value.sum(dim=others))
        return sums[:-1]  # the last one is of entries that belong to no channel

    def expand(self, masks: Sequence[Tensor]) -> Masks:
        """Mask the input channels of every weight that reads the spaces."""
        alive = torch.cat([mask.reshape(-1) for mask in masks])
        expanded: Masks = {}
        for place, weight in zip(self.places.readers, self.weights, strict=True):
            mask = place.along(alive, weight).expand(weight.shape)
            expanded[place.name] = (expanded[place.name] & mask if place.name in expanded else mask).clone()
        return expanded

    def cut(self, masks: Mapping[str, Tensor]) -> Cut:
        """What is left without the channels that no weight reads."""
        return self.without(~self.places.read(masks))

    def without(self, gone: Tensor) -> Cut:
        """What is left without these channels; one flag for each channel of all spaces."""
        dead = {atom for atom, is_gone in zip(self.places.atoms, gone.tolist(), strict=True) if is_gone}
        return plan(self.model, self.trace, self.spaces, dead)

    @torch.no_grad()
    def slim(self, model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
        """A smaller copy of a model whose weights are under these masks; checked against it on the example."""
        small = self.cut(masks).applied(model)
        answers = []
        for net in (small, model):
            with untouched(net):
                try:
                    answers.append(ask(net, copied(self.example)))
                except Exception as error:  # forward may do anything
                    raise ModelError(f"the smaller network doesn't run: {first_line(error)}") from error
        gap = difference(*answers)
        if not gap <= TOLERANCE:
            raise ModelError(f"the smaller network is off by {gap:.1e}: are these the masks of this model's weights?")
        return small


def _fitting(model: nn.Module, example: Inputs) -> Inputs:
    """One or two examples where the model is, in its precision; a model that can't be followed is refused."""
    parameters = list(model.parameters())
    name = type(model).__name__
    check_readable(model)
    like = next((tensor for tensor in parameters if tensor.is_floating_point()), None)
    if like is None:
        raise ModelError(f"{name} has no parameters, and so no channels that can be pruned")
    given = tensors(example)
    if not given or any(tensor.ndim == 0 or len(tensor) == 0 for tensor in given):
        raise ModelError(f"an example of {described(example)} is no batch for {name}")
    return copied(first_rows(example, 2), like)
