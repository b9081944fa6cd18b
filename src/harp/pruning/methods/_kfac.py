"""Block K-FAC: the empirical Fisher matrix of each weight, times a direction, without forming a matrix.

Martens, Grosse: "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", ICML 2015; for convolutions
Grosse, Martens: "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML 2016.

A layer maps a patch a of its input to an output at each of S positions, y = W a; g is the gradient of one sample's loss
with respect to y. The Fisher matrix of W is then close to a Kronecker product, and of G only the diagonal is used here:

    F = A ⊗ G      A = E[Σ aaᵀ] / S²,  G = S · E[Σ ggᵀ]      sums over positions, means over samples
    (F D)_ij = G_ii (D A)_ij

D A = E[Σ (D a) aᵀ] / S² is the layer's output for the weight D, sent back to the weight: one call of the layer and one
backward pass through it. So the layer itself handles stride, padding, dilation, groups and transposition, and A,
which has 21 million entries for a 3 × 3 convolution of 512 channels, needs no memory. Biases do not change, so A has no
column of ones for them.

A weight that is packed (attention's projections), used twice, or in a layer of another kind has no such factors. Its F
is the diagonal of the empirical Fisher matrix, (F D)_ij = E[(∂L/∂W_ij)²] D_ij, exact and sample by sample.

The factors are needed per batch, at weights that depend on the batch, and times one direction only. The operators of
`curvlinops` are of one network over a data set, and hold the factors of all layers at once, so it is not used here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> the sum of the samples' losses

# Layers that are linear in their weight; a subclass may not be.
_LAYERS = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}

_Call = tuple[nn.Module, tuple[Any, ...], GradientEdge]


def fisher_products(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    directions: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
) -> Iterator[tuple[str, Tensor]]:
    """F D for the direction D of each weight, where `model` has these weights.

    The model is not changed. It must be in a mode in which samples do not depend on each other, as they do in a batch
    norm in train mode.
    """
    at = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    calls: dict[str, list[_Call]] = {name: [] for name in at}
    handles = [
        module.register_forward_hook(partial(_record, calls[name]), with_kwargs=True)
        for name, module in _owners(model, at)
    ]
    try:
        value = loss(functional_call(model, at, (x,)), y)
    finally:
        for handle in handles:
            handle.remove()
    own = {name: uses[0] for name, uses in calls.items() if len(uses) == 1 and len(uses[0][1]) == 1}
    edges = [edge for _, _, edge in own.values()]
    gradients: Sequence[Tensor | None] = torch.autograd.grad(value, edges, allow_unused=True) if own else ()
    for (name, (module, inputs, _)), gradient in zip(own.items(), gradients, strict=True):
        if gradient is None:  # the loss does not depend on the layer
            yield name, torch.zeros_like(directions[name])
        else:
            yield name, layer_product(module, inputs[0], gradient, directions[name], len(x))
    others = [name for name in at if name not in own]
    for name, diagonal in zip(others, _diagonals(model, at, others, x, y, loss), strict=True):
        yield name, diagonal * directions[name]


def layer_product(module: nn.Module, x: Tensor, gradient: Tensor, direction: Tensor, samples: int) -> Tensor:
    """G_ii (D A)_ij of one layer, from its input and the samples' gradients of its output."""
    spatial = direction.ndim - 2
    by_channel = gradient.detach().movedim(-1 - spatial, -1).flatten(0, -2)
    positions = len(by_channel) / samples
    diagonal = (positions * by_channel).square().mean(0).reshape(-1, *[1] * spatial)
    moved = direction.detach().clone().requires_grad_()
    parts = {name: torch.zeros_like(value) for name, value in module.named_parameters()} | {"weight": moved}
    output = functional_call(module, parts, (x.detach(),))
    (product,) = torch.autograd.grad(output, moved, diagonal * output.detach())
    return product / (samples * positions**2)


def _owners(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """The layers that use these weights, several for one that is tied."""
    names = {id(model.get_parameter(name)): name for name in weights}
    for module in model.modules():
        name = names.get(id(module._parameters.get("weight")))
        if name is not None and type(module) in _LAYERS:
            yield name, module


def _record(calls: list[_Call], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note a call of a layer. The edge stays that of this output, also if it is later changed in place."""
    if output.requires_grad:
        calls.append((module, (*args, *kwargs.values()), get_gradient_edge(output)))


def _diagonals(
    model: nn.Module, at: Mapping[str, Tensor], names: Sequence[str], x: Tensor, y: Tensor, loss: Loss
) -> list[Tensor]:
    """The mean of every entry's squared gradient over the samples."""
    sums = [torch.zeros_like(at[name]) for name in names]
    for i in range(len(x) if names else 0):
        value = loss(functional_call(model, dict(at), (x[i : i + 1],)), y[i : i + 1])
        gradients = torch.autograd.grad(value, [at[name] for name in names], allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient.square()
    return [total / len(x) for total in sums]
