"""The engine beside a model of torch whose weights go on changing: for attacks on it while it stands still.

What the model computes is found out once. Then, each time it is asked for, the weights that are not zero are read
anew; when other weights are zero than before, the programs are made anew too.
"""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harp.errors import ModelError, RecipeError
from harp.sparse import native
from harp.sparse.capture import Captured, capture
from harp.sparse.folds import bias_name, normed
from harp.sparse.network import Network
from harp.sparse.taps import Weight

_SWITCH = "HARP_ENGINE"  # off: never; always: whenever it is possible; else where it is faster


def wanted() -> str:
    """What the user says of the engine: "off", "always", or "auto"."""
    said = os.environ.get(_SWITCH) or "auto"
    if said not in ("off", "always", "auto"):
        raise RecipeError(f"{_SWITCH}={said}: choose from off, always, auto")
    return "off" if native.kernels() is None else said


class Follower:
    """A function from images to logits with the weights that a model had when it was last followed."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.captured: Captured = capture(model, example)
        if self.captured.detached:
            raise ModelError("the model detaches results from the gradient, which a graph can't say")
        self.network: Network | None = None
        self._layers = {node.tensors["weight"] for node in self.captured.graph.nodes if node.op in ("conv", "linear")}
        self._places: dict[str, Tensor] = {}

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Take the present weights of the model."""
        get = self.captured.source(model)
        weights = {name: get(name).reshape(-1).float() for name in self._layers}
        if self.network is None or not all(self._same(name, weight) for name, weight in weights.items()):
            self._places = {name: weight.nonzero().reshape(-1) for name, weight in weights.items()}
            values, biases = self._values(get, weights)
            sparse = {
                name: Weight(tuple(get(name).shape), self._places[name].numpy(), values[name]) for name in self._layers
            }
            others = {name: get(name).numpy() for name in self._others() - biases.keys()}
            self.network = Network(self.captured.graph, others | biases | sparse, threads=torch.get_num_threads())
            return
        values, biases = self._values(get, weights)
        changed: dict[Any, Any] = {}
        for product in self.network.products():
            if product.weight is None:
                continue
            bias = product.bias_name
            found = None if bias is None else biases[bias] if bias in biases else get(bias).numpy()
            if product.weight in values:  # a layer's, else a scale's
                where = np.searchsorted(self._places[product.weight].numpy(), product.taps.index)
                changed[product] = values[product.weight][where], found
            else:
                changed[product] = get(product.weight).reshape(-1).numpy()[product.taps.index], found
        self.network.refill(changed, {name: get(name) for name in self.network.borrowed()})

    def __call__(self, x: Tensor) -> Tensor:
        """The logits, with a gradient for the images where one is asked for."""
        assert self.network is not None
        if x.requires_grad and torch.is_grad_enabled():
            return _Pass.apply(x, self.network)  # type: ignore[no-any-return, no-untyped-call]
        return torch.from_numpy(self.network.forward(_array(x))[0])

    def _others(self) -> set[str]:
        return set(self.captured.graph.tensor_names()) - self._layers

    def _same(self, name: str, weight: Tensor) -> bool:
        """Whether the weights that are not zero are where they were."""
        places = self._places[name]
        return int(weight.count_nonzero()) == len(places) and bool(weight[places].all())

    def _values(self, get: Any, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The weights that are not zero and the biases, with the norms behind them."""
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
    """Logits, and the gradient of the images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, network: Network) -> Tensor:
        found, ctx.trace = network.forward(_array(x), keep=True)
        ctx.network = network
        return torch.from_numpy(found)

    @staticmethod
    @once_differentiable  # a second derivative would be zero in silence
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        found = ctx.network.backward(ctx.trace, gradient.detach().contiguous().numpy())
        return torch.from_numpy(found), None


def _array(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()
