"""Units: what is pruned, within which limits, and what it costs.

A layer of units is what a pruner gives one rate to: a weight tensor whose entries go one by one (`Weights`), or the
channels that several tensors share (`harp.pruning.channels`). A method chooses units and never learns what they are;
here they become masks of parameters, and their cost is counted.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from harp.errors import BudgetError, ModelError, RecipeError
from harp.models.inputs import Inputs
from harp.pruning import masks as mask_ops
from harp.pruning.macs import positions
from harp.pruning.masks import Masks
from harp.pruning.prunable import check_include, check_patterns, classify, limits, matches
from harp.system.nearest import unknown
from harp.system.numbers import brief, share

BUDGETS = {"weights": "weights", "macs": "MACs"}
"""What a budget of single weights may count, and how that is written."""

_Floats = npt.NDArray[np.float64]


class Units(Protocol):
    """What a pruner and an allocation need to know of the things that may be pruned.

    Example:
        units: harp.Units = harp.Weights(model)
        print(units.kind, units.size, units.total(0.1))
    """

    model: nn.Module
    kind: str  # what the units are, in words: "weights", "channels"
    noun: str  # the budget's unit in words: "weights", "FLOPs", "bytes", ...
    names: list[str]  # of the layers
    sizes: list[int]  # units in each layer
    floors: list[float]  # the least share that each layer must keep, and the largest that it may
    ceilings: list[float]
    lower: list[int]  # the same as counts, at least 1
    upper: list[int]
    steps: list[int]  # a layer's count is a multiple of this, or the whole layer
    fans: list[int]  # what feeds one unit's output: the fan-in that initial scores are scaled by
    size: int  # what the whole network costs, in the budget's unit
    masked: list[str]  # the parameters that masks act on
    initial_rate: float  # where HARP's rates start, and how fast its γ grows: the paper's values for such units
    gamma_step: float

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that masks act on, in the order of `masked`."""
        ...

    @property
    def example(self) -> Inputs | None:
        """What the model is called with, such as images, to follow its channels, if that is known."""
        ...

    def total(self, keep: float | str) -> int:
        """The integer budget of a keep rate."""
        ...

    def cost(self, rates: Tensor) -> Tensor:
        """What is spent at these rates, in the budget's unit; differentiable."""
        ...

    def slope(self, rates: _Floats) -> tuple[float, _Floats]:
        """The same cost and its gradient, as plain numbers: for simulations of many steps."""
        ...

    def counts(self, rates: Sequence[float]) -> list[int]:
        """How many units each layer keeps while its rate is learned: rounded as in HARP's paper, within the limits."""
        ...

    def spend(self, counts: Sequence[int]) -> int:
        """The exact cost of keeping so many units of each layer; it never falls when a count grows."""
        ...

    def spent(self, masks: Mapping[str, Tensor]) -> int:
        """The exact cost of parameters under these masks."""
        ...

    def uniform_rate(self, total: int) -> float:
        """The rate of all layers at which so much is spent."""
        ...

    def strength(self, values: Sequence[Tensor], order: int) -> list[Tensor]:
        """For each layer, the l1 or l2 norm (`order`) of the parameters' values that each unit masks."""
        ...

    def gather(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn gradients on the parameters' masks into those on the units': sums over what each masks."""
        ...

    def expand(self, masks: Sequence[Tensor]) -> Masks:
        """Turn one mask a layer of units into masks of the parameters, in the order of `masked`."""
        ...


def exact(units: Units) -> bool:
    """Whether the budget counts the units themselves, one by one: then it can be met to the unit."""
    return units.noun == units.kind and set(units.steps) == {1}


class Weights:
    """Single weights: every matrix-shaped weight of a model, each entry on its own.

    Convolution and linear weights of any kind count, packed attention projections too; biases, norms, embeddings and
    bare parameters (class tokens, position embeddings) don't: `left_out` says why for each. A tensor that is used
    twice is one layer. Patterns are shell-style and are matched against the parameter's name and its module's name.

    Arguments:
        model: any `nn.Module`.
        ignore: layers to leave dense and out of the budget.
        include: parameters to prune that would be left out: bare ones that do the work, embeddings, biases, ...
        minimum, maximum: per pattern, the share of a layer that must / may be kept.
        budget: what `keep` is a share of: "weights", or "macs", the multiplications that the kept weights take for one
            image. Early layers of a convolutional network hold few weights and do much of the work.
        example: images of the kind to come: a budget of MACs needs their shape, and methods follow the ways through the
            model with them. `harp.fit` takes its first batch if there are none. A tuple of tensors is several
            arguments of the model, a dict is named ones.

    Example:
        units = harp.Weights(model, ignore=["features.0"], minimum={"classifier.*": 0.2})
        pruner = harp.Harp(units, keep=0.1)
    """

    kind = "weights"
    initial_rate = 0.1
    gamma_step = 0.01

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore: Sequence[str] = (),
        include: Sequence[str] = (),
        minimum: Mapping[str, float] | None = None,
        maximum: Mapping[str, float] | None = None,
        budget: str = "weights",
        example: Inputs | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"model {brief(model)}: give an nn.Module, such as harp.build_model(...) makes")
        self.model, self.example = model, example
        self.left_out: dict[str, str] = {}
        self.names = [name for name, reason in classify(model, include) if self._prunable(name, reason, ignore)]
        check_patterns([*ignore, *include, *(minimum or {}), *(maximum or {})], model)
        for pattern in include:
            check_include(pattern, self.names, self.left_out)
        if not self.names:
            lazy = next((reason for reason in self.left_out.values() if reason.startswith("not initialised")), None)
            reason = lazy or "none is matrix-shaped and not ignored"
            raise ModelError(f"{type(model).__name__} has no prunable weights: {reason}")
        try:
            self.weights  # noqa: B018  # a model that TorchScript compiled does not give its parameters
        except RuntimeError as error:
            raise ModelError(
                f"{type(model).__name__} is compiled by TorchScript: give the module that it was made of"
            ) from error
        self.masked = self.names
        self.sizes = [weight.numel() for weight in self.weights]
        for name, weight in zip(self.names, self.weights, strict=True):
            if weight.is_meta:
                raise ModelError(f"weight {name!r} is on the meta device, where it has no values: load the model first")
            if not torch.isfinite(weight).all():
                raise ModelError(f"weight {name!r} holds NaN or infinity: the model is damaged or has diverged")
        self.floors, self.ceilings, self.lower, self.upper = limits(self.names, self.sizes, minimum, maximum, self.kind)
        self.steps = [1] * len(self.names)
        self.fans = [weight[0].numel() for weight in self.weights]
        if budget not in BUDGETS:
            raise RecipeError(unknown("budget of single weights", budget, BUDGETS))
        self.noun = BUDGETS[budget]
        self.prices = [1] * len(self.names) if budget == "weights" else self._macs(example)
        self.size = self.spend(self.sizes)
        self._dense_costs = np.array([price * n for price, n in zip(self.prices, self.sizes, strict=True)], dtype=float)

    def _prunable(self, name: str, reason: str | None, ignore: Sequence[str]) -> bool:
        if reason is None and any(matches(name, pattern) for pattern in ignore):
            reason = "ignored on request"
        if reason is not None:
            self.left_out[name] = reason
        return reason is None

    def _macs(self, example: Tensor | None) -> list[int]:
        """How often one image is multiplied by a weight of each layer."""
        if example is None:
            raise RecipeError("a budget of MACs depends on the images' size: give an `example`, a batch of them")
        is_image = isinstance(example, Tensor) and example.is_floating_point()
        known = positions(self.model, tuple(example.shape[1:]) if is_image else example)
        unknown = [name for name in self.names if not known.get(name)]
        if unknown:
            raise ModelError(
                f"a budget of MACs can't price weight {unknown[0]!r}: no layer that is known here uses it; ignore it"
            )
        return [known[name] for name in self.names]

    def __repr__(self) -> str:
        """What there is to prune, in a line."""
        cost = "" if self.noun == self.kind else f", {self.size:,} {self.noun}"
        return f"Weights({sum(self.sizes):,} weights in {len(self.names)} layers of {type(self.model).__name__}{cost})"

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters, looked up afresh: a model may be moved or reloaded in between."""
        return [self.model.get_parameter(name) for name in self.names]

    def total(self, keep: float | str) -> int:
        """The integer budget: `keep` times what the whole network costs, rounded, checked against the limits."""
        return checked_total(self, keep)

    def cost(self, rates: Tensor) -> Tensor:
        """The cost of the weights kept at these rates."""
        return (rates * torch.as_tensor(self._dense_costs, dtype=rates.dtype, device=rates.device)).sum()

    def slope(self, rates: _Floats) -> tuple[float, _Floats]:
        """The cost of the weights kept at these rates, and its gradient: it is linear."""
        return float((rates * self._dense_costs).sum()), self._dense_costs

    def counts(self, rates: Sequence[float]) -> list[int]:
        """n - floor((1 - a) n) of each layer, within its limits."""
        counts = [n - int((1 - a) * n) for a, n in zip(rates, self.sizes, strict=True)]
        return [max(low, min(count, high)) for count, low, high in zip(counts, self.lower, self.upper, strict=True)]

    def spend(self, counts: Sequence[int]) -> int:
        """The cost of so many weights of each layer."""
        return sum(price * count for price, count in zip(self.prices, counts, strict=True))

    def spent(self, masks: Mapping[str, Tensor]) -> int:
        """The cost of the weights that live."""
        return self.spend([mask_ops.kept({name: masks[name]}) for name in self.names])

    def uniform_rate(self, total: int) -> float:
        """The budget's share of the whole."""
        return total / self.size

    def strength(self, values: Sequence[Tensor], order: int) -> list[Tensor]:
        """Magnitudes: any norm of a single value."""
        return [value.detach().abs() for value in values]

    def gather(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients as they are: every weight has a mask of its own."""
        return list(gradients)

    def expand(self, masks: Sequence[Tensor]) -> Masks:
        """The masks by their names."""
        return dict(zip(self.names, masks, strict=True))


def checked_total(units: Units, keep: float | str) -> int:
    """`keep` times what the whole network costs, rounded; refused where the layers' limits can't be kept within it."""
    keep = share(keep)
    total = math.floor(keep * units.size + 0.5)
    least, most = units.spend(units.lower), units.spend(units.upper)
    if not least <= total <= most:
        bound = f"at least {least:,}" if total < least else f"at most {most:,}"
        raise BudgetError(
            f"keep {keep:.6g} leaves {total:,} of {units.size:,} {units.noun}, but the {len(units.names)} layers and "
            f"their limits need {bound} (keep {max(least, min(total, most)) / units.size:.3g})"
        )
    return total
