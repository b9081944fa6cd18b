"""Batch norms as a scale and a shift, folded into the layers before them.

γ (Wx + b − μ) / √(σ² + ε) + β  =  (sW) x + s (b − μ) + β      with  s = γ / √(σ² + ε)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fold:
    """A batch norm folded into a layer: the names of its tensors in the model's state, None for missing ones."""

    bias: str | None
    scale: str | None
    shift: str | None
    mean: str
    variance: str
    epsilon: float


def folded(weight: str, fold: Fold, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The weight and bias of one layer that computes a layer and the norm behind it."""
    scale, shift = normed(fold, get)
    whole = get(weight)
    bias = shift if fold.bias is None else shift + scale * get(fold.bias)
    return {weight: whole * scale.reshape(-1, *[1] * (whole.ndim - 1)), bias_name(weight): bias}


def normed(fold: Fold, get: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """The scale and the shift of a batch norm, by channel."""
    mean, variance = get(fold.mean), get(fold.variance)
    scale = torch.rsqrt(variance + fold.epsilon)
    scale = scale if fold.scale is None else scale * get(fold.scale)
    shift = -mean * scale
    return scale, shift if fold.shift is None else shift + get(fold.shift)


def bias_name(weight: str) -> str:
    """The name of the bias that belongs to a weight."""
    return f"{weight.removesuffix('.weight')}.bias"
