"""Which parameters of a model may be pruned, by what names they are called, and within which limits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from harp.errors import BudgetError, ModelError

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def classify(model: nn.Module, include: Sequence[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Name every parameter once, with the reason why it can't be pruned or None."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, _EMBEDDINGS)}
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner = owners[name.rpartition(".")[0]]
        if "parametrizations." in name or name.endswith(("weight_g", "weight_v", "weight_orig")):
            yield name, "re-parametrised: remove the parametrisation first"
        elif isinstance(parameter, nn.parameter.UninitializedParameter):
            yield name, "not initialised yet: run one batch through the model first"
        elif not parameter.is_floating_point():
            yield name, f"of type {parameter.dtype}"
        elif parameter.ndim and any(matches(name, pattern) for pattern in include):
            yield name, None
        elif parameter.ndim < 2:
            yield name, "a vector (bias or scale)"
        elif isinstance(owner, _NORMS):
            yield name, "belongs to a norm"
        elif id(parameter) in embedded:
            yield name, "an embedding"
        elif not name.endswith("weight"):
            yield name, "a bare parameter: name it in `include` to prune it"
        else:
            yield name, None


def matches(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern means this parameter, by its own name or its module's."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def check_include(pattern: str, names: Sequence[str], left_out: Mapping[str, str]) -> None:
    """Refuse a pattern of what is to be pruned too if all that it means can't be pruned."""
    if any(matches(name, pattern) for name in names):
        return
    name, reason = next((name, reason) for name, reason in left_out.items() if matches(name, pattern))
    raise ModelError(f"include {pattern!r}: {name!r} can't be pruned: {reason}")


def check_patterns(patterns: Sequence[str], model: nn.Module) -> None:
    """Refuse a pattern that means no parameter."""
    for pattern in patterns:
        if not any(matches(name, pattern) for name, _ in model.named_parameters()):
            raise ModelError(f"pattern {pattern!r} matches no parameter: see `harp doctor` for the names")


def check_readable(model: nn.Module) -> None:
    """Refuse a model whose weights have no values yet, or whose code can't be watched."""
    name, parameters = type(model).__name__, list(model.parameters())
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError(f"{name} is compiled by TorchScript: give the module that it was made of")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        raise ModelError(f"{name} has weights that are not initialised yet: run one batch through it first")
    if any(parameter.is_meta for parameter in parameters):
        raise ModelError(f"{name} has weights on the meta device, which have no values: load them first")


class Limits(NamedTuple):
    """What each layer must and may keep, as shares and as counts; at least 1 unit."""

    floors: list[float]
    ceilings: list[float]
    lower: list[int]
    upper: list[int]


def limits(
    names: Sequence[str],
    sizes: Sequence[int],
    minimum: Mapping[str, float] | None,
    maximum: Mapping[str, float] | None,
    kind: str,
) -> Limits:
    """The limits that patterns give to layers of so many units of a kind."""
    floors = [_limit(name, minimum, 0.0) for name in names]
    ceilings = [_limit(name, maximum, 1.0) for name in names]
    lower = [max(1, math.ceil(share * n - 1e-9)) for share, n in zip(floors, sizes, strict=True)]
    upper = [max(1, math.floor(share * n + 1e-9)) for share, n in zip(ceilings, sizes, strict=True)]
    for name, low, high in zip(names, lower, upper, strict=True):
        if low > high:
            raise BudgetError(f"layer {name!r} must keep at least {low} and at most {high} {kind}")
    return Limits(floors, ceilings, lower, upper)


def _limit(name: str, limits: Mapping[str, float] | None, default: float) -> float:
    shares = [share for pattern, share in (limits or {}).items() if matches(name, pattern)]
    for share in shares:
        if not 0 <= share <= 1:
            raise BudgetError(f"limit {share:.6g} for layer {name!r}: give a share from 0 to 1")
    return shares[-1] if shares else default  # the last pattern wins, as in most ignore files
