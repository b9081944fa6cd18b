"""The sparse engine for a torch model in training: it attacks the model between two weight updates.

The model's graph is captured once. `follow` then copies the current nonzero weights into the engine. If other weights
are zero than before, it also builds the programs again.
"""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harp.engine.capture.capture import Captured, capture
from harp.engine.format.reader import Stored
from harp.engine.graph.passes import bias_name, normed
from harp.engine.native import bindings
from harp.engine.network import Network
from harp.errors import ModelError, RecipeError

_SWITCH = "HARP_ENGINE"  # off: never; always: whenever possible; auto: if it is faster


def wanted() -> str:
    """Whether the user wants the engine: "off", "always" or "auto"; "off" without native code."""
    choice = os.environ.get(_SWITCH) or "auto"
    if choice not in ("off", "always", "auto"):
        raise RecipeError(f"{_SWITCH}={choice}: choose from off, always, auto")
    return "off" if bindings.kernels() is None else choice


def is_nonzero_at(weight: Tensor, positions: Tensor) -> bool:
    """Whether a flat weight is nonzero at these positions, and nowhere else."""
    return int(weight.count_nonzero()) == len(positions) and bool(weight[positions].all())


class Follower:
    """A function from images to logits with the weights that a model had at the last call of `follow`."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.captured: Captured = capture(model, example)
        if self.captured.detached:
            raise ModelError("the model detaches results from the gradient, which a graph can't represent")
        self.network: Network | None = None
        self._layers = {node.tensors["weight"] for node in self.captured.graph.nodes if node.op in ("conv", "linear")}
        self._places: dict[str, Tensor] = {}

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Copy the current weights of the model."""
        get, graph = self.captured.source(model), self.captured.graph
        weights = {name: get(name).reshape(-1).float() for name in self._layers}
        same = all(name in self._places and is_nonzero_at(w, self._places[name]) for name, w in weights.items())
        if not same:
            self._places = {name: weight.nonzero().reshape(-1) for name, weight in weights.items()}
        values, others = self._values(get, weights)
        others |= {name: get(name).numpy() for name in graph.tensor_names() if name not in {*values, *others}}
        if self.network is None or not same:
            shapes = {name: tuple(get(name).shape) for name in values}
            sparse = {name: Stored(shapes[name], self._places[name].numpy(), values[name]) for name in values}
            self.network = Network(graph, others | sparse, threads=torch.get_num_threads())
            return
        changed: dict[Any, Any] = {}
        for product in self.network.products():
            if product.weight is None:
                continue
            if product.weight in values:
                positions = np.searchsorted(self._places[product.weight].numpy(), product.taps.index)
                weight = values[product.weight][positions]
            else:  # an affine map
                weight = others[product.weight].reshape(-1)[product.taps.index]
            changed[product] = weight, None if product.bias_name is None else others[product.bias_name]
        self.network.refill(changed, {name: get(name) for name in self.network.tensors})

    def __call__(self, x: Tensor) -> Tensor:
        """The logits of images, differentiable with respect to the images."""
        if self.network is None:
            raise ModelError("the engine has no weights yet: call follow(model) first")
        if x.requires_grad and torch.is_grad_enabled():
            return _Pass.apply(x, self.network)  # type: ignore[no-any-return, no-untyped-call]
        return torch.from_numpy(self.network.forward(_array(x))[0])

    def _values(self, get: Any, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The nonzero weights, and the biases of layers with a folded batch norm."""
        values, biases = {}, {}
        for name, weight in weights.items():
            kept = weight[self._places[name]]
            fold = self.captured.folds.get(name)
            if fold is not None:
                scale, shift = normed(fold, get)
                rows = torch.div(self._places[name], weight.numel() // len(scale), rounding_mode="floor")
                kept = kept * scale[rows]
                bias = shift if fold.bias is None else shift + scale * get(fold.bias)
                biases[bias_name(name)] = bias.numpy()
            values[name] = kept.numpy()
        return values, biases


class _Pass(torch.autograd.Function):
    """The network with the gradient of the images, for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, network: Network) -> Tensor:
        logits, ctx.trace = network.forward(_array(x), keep=True)
        ctx.network = network
        return torch.from_numpy(logits)

    @staticmethod
    @once_differentiable  # else a second derivative would silently be zero
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        input_gradient = ctx.network.backward(ctx.trace, gradient.detach().contiguous().numpy())
        return torch.from_numpy(input_gradient), None


def _array(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()
