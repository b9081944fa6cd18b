"""Units: what is pruned, within which limits, and what it costs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn

from harp.errors import BudgetError, ModelError

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Units(Protocol):
    """What a pruner and an allocation need to know of the things that may be pruned."""

    model: nn.Module
    names: list[str]
    sizes: list[int]
    floors: list[float]  # the least share that each layer must keep, and the largest that it may
    ceilings: list[float]
    lower: list[int]  # the same as counts, at least 1
    upper: list[int]

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that hold the units, in the order of `names`."""
        ...

    def total(self, keep: float) -> int:
        """The integer budget of a keep rate."""
        ...

    def cost(self, rates: Tensor) -> Tensor:
        """What is spent at these rates, in the budget's unit; differentiable."""
        ...


class Weights:
    """Single weights: every matrix-shaped weight of a model, each entry on its own.

    Convolution and linear weights of any kind count, packed attention projections too; biases, norms, embeddings and
    bare parameters (class tokens, position embeddings) don't: `left_out` says why for each. A tensor that is used
    twice is one layer. Patterns are shell-style and are matched against the parameter's name and its module's name.

    Arguments:
        ignore: layers to leave dense and out of the budget.
        include: bare parameters to prune all the same.
        minimum, maximum: per pattern, the share of a layer that must / may be kept.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore: Sequence[str] = (),
        include: Sequence[str] = (),
        minimum: Mapping[str, float] | None = None,
        maximum: Mapping[str, float] | None = None,
    ) -> None:
        self.model = model
        self.left_out: dict[str, str] = {}
        self.names = [name for name, reason in _classify(model, include) if self._prunable(name, reason, ignore)]
        if not self.names:
            raise ModelError(f"{type(model).__name__} has no prunable weights: none is matrix-shaped and not ignored")
        _check_patterns([*ignore, *include, *(minimum or {}), *(maximum or {})], model)
        self.sizes = [weight.numel() for weight in self.weights]
        for name, weight in zip(self.names, self.weights, strict=True):
            if not torch.isfinite(weight).all():
                raise ModelError(f"weight {name!r} holds NaN or infinity: the model is damaged or has diverged")
        self.floors = [_limit(name, minimum, 0.0) for name in self.names]
        self.ceilings = [_limit(name, maximum, 1.0) for name in self.names]
        self.lower = [max(1, math.ceil(share * n - 1e-9)) for share, n in zip(self.floors, self.sizes, strict=True)]
        self.upper = [max(1, math.floor(share * n + 1e-9)) for share, n in zip(self.ceilings, self.sizes, strict=True)]
        for name, low, high in zip(self.names, self.lower, self.upper, strict=True):
            if low > high:
                raise BudgetError(f"layer {name!r} must keep at least {low} and at most {high} weights")

    def _prunable(self, name: str, reason: str | None, ignore: Sequence[str]) -> bool:
        if reason is None and any(_matches(name, pattern) for pattern in ignore):
            reason = "ignored on request"
        if reason is not None:
            self.left_out[name] = reason
        return reason is None

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters, looked up afresh: a model may be moved or reloaded in between."""
        return [self.model.get_parameter(name) for name in self.names]

    def total(self, keep: float) -> int:
        """The integer budget: `keep` times the number of weights, rounded, checked against the limits."""
        if not 0 < keep <= 1:
            raise BudgetError(f"keep {keep:.6g}: give a share above 0 and at most 1 (= 100%)")
        size = sum(self.sizes)
        total = math.floor(keep * size + 0.5)
        least, most = sum(self.lower), sum(self.upper)
        if not least <= total <= most:
            bound = f"at least {least:,}" if total < least else f"at most {most:,}"
            raise BudgetError(
                f"keep {keep:.6g} leaves {total:,} of {size:,} weights, but the {len(self.names)} layers and their "
                f"limits need {bound} (keep {max(least, min(total, most)) / size:.3g})"
            )
        return total

    def cost(self, rates: Tensor) -> Tensor:
        """The number of weights kept at these rates."""
        return (rates * torch.tensor(self.sizes, dtype=rates.dtype, device=rates.device)).sum()


def _classify(model: nn.Module, include: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Name every parameter once, with the reason why it can't be pruned or None."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, _EMBEDDINGS)}
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner = owners[name.rpartition(".")[0]]
        if any(_matches(name, pattern) for pattern in include):
            yield name, None
        elif "parametrizations." in name or name.endswith(("weight_g", "weight_v", "weight_orig")):
            yield name, "re-parametrised: remove the parametrisation first"
        elif isinstance(parameter, nn.parameter.UninitializedParameter):
            yield name, "not initialised yet: run one batch through the model first"
        elif parameter.ndim < 2:
            yield name, "a vector (bias or scale)"
        elif isinstance(owner, _NORMS):
            yield name, "belongs to a norm"
        elif id(parameter) in embedded:
            yield name, "an embedding"
        elif not name.endswith("weight"):
            yield name, "a bare parameter: name it in `include` to prune it"
        elif not parameter.is_floating_point():
            yield name, f"of type {parameter.dtype}"
        else:
            yield name, None


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _check_patterns(patterns: Sequence[str], model: nn.Module) -> None:
    for pattern in patterns:
        if not any(_matches(name, pattern) for name, _ in model.named_parameters()):
            raise ModelError(f"pattern {pattern!r} matches no parameter: see `harp doctor` for the names")


def _limit(name: str, limits: Mapping[str, float] | None, default: float) -> float:
    shares = [share for pattern, share in (limits or {}).items() if _matches(name, pattern)]
    for share in shares:
        if not 0 <= share <= 1:
            raise BudgetError(f"limit {share:.6g} for layer {name!r}: give a share from 0 to 1")
    return shares[-1] if shares else default  # the last pattern wins, as in most ignore files
