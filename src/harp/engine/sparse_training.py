"""Training of a pruned network: the forward and backward passes of sparse layers use only the kept weights.

A layer's output, the gradient of its input and the gradients of its kept weights are products over the kept weights
alone. Torch computes everything between the layers, such as batch norms in training mode.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from harp.engine.follower import is_nonzero_at, wanted
from harp.engine.format.reader import Stored
from harp.engine.graph import reference
from harp.engine.graph.nodes import Graph, Node
from harp.engine.lowering.lower import Product, Stage, stages
from harp.engine.native import bindings
from harp.engine.runner import Runner

# The share of kept weights up to which a layer is faster this way, with the cost of packing its input and output:
# measured on the layers of ResNet18, forward and backward. If the positions of the weights change at every step, the
# programs are built again every time, so the limit is lower.
SPARSE_ENOUGH, SPARSE_ENOUGH_TO_CHANGE = 0.2, 0.05
WORTH = 1 << 14  # smaller layers, in weights, gain nothing


class SparseForward:
    """A model's forward pass in which native code computes the sparse layers, if there is any for this CPU.

    Arguments:
        forward: the function that computes the pass, the model or a wrapper around it.
        masks: fixed masks by parameter name; the gradients of pruned weights are then zero. Without masks the
            gradients of all weights are computed, and weights that are zero count as pruned.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], masks: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.forward, self.masks = model, forward, masks
        self._layers: dict[str, _Layer] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's output for a batch; layers whose input does not suit the native code compute it in torch."""
        if torch.is_autocast_enabled("cpu") or wanted() == "off":
            return self.forward(*inputs, **named)
        with _replaced_forwards(self.sparse_layers()):
            return self.forward(*inputs, **named)

    def sparse_layers(self) -> dict[nn.Module, "_Layer"]:
        """The layers that are sparse with the current weights or masks."""
        limit = SPARSE_ENOUGH_TO_CHANGE if self.masks is None else SPARSE_ENOUGH
        layers = {}
        for name, module in self.model.named_modules():
            if not _is_supported(module) or module.weight.numel() < WORTH:
                continue
            mask = None if self.masks is None else self.masks.get(f"{name}.weight")
            layer = self._layers.get(name)
            if layer is None or not layer.holds(mask):
                kept = module.weight.detach() if mask is None else mask
                if int(kept.count_nonzero()) > limit * kept.numel():
                    self._layers.pop(name, None)
                    continue
                layer = self._layers[name] = _Layer(module, kept.reshape(-1).nonzero().reshape(-1), mask)
            layers[module] = layer
        return layers


def _is_supported(module: Any) -> bool:
    if parametrize.is_parametrized(module) or "forward" in vars(module):
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


@contextmanager
def _replaced_forwards(layers: Mapping[nn.Module, "_Layer"]) -> Iterator[None]:
    """Replace the forward methods of modules by their sparse layers."""
    try:
        for module, layer in layers.items():
            module.forward = layer  # an attribute of this instance, removed at the end
        yield
    finally:
        for module in layers:
            vars(module).pop("forward", None)


class _Layer:
    """A convolution or linear layer that uses the weights at the positions `index` only."""

    def __init__(self, module: Any, index: Tensor, mask: Tensor | None) -> None:
        self.module, self.index, self.mask = module, index, mask
        self._compiled: dict[tuple[int, ...], _Compiled] = {}

    def holds(self, mask: Tensor | None) -> bool:
        """Whether `index` is still valid for the mask, or without a mask for the nonzero weights."""
        if mask is not None or self.mask is not None:
            return mask is self.mask
        return is_nonzero_at(self.module.weight.detach().reshape(-1), self.index)

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        fits = x.ndim == (4 if isinstance(module, nn.Conv2d) else 2) and len(x)
        if not fits or x.dtype != torch.float32 or not x.is_cpu:
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        output: Tensor = _Sparse.apply(x, module.weight, module.bias, self)  # type: ignore[no-untyped-call]
        return output

    def compiled(self, shape: tuple[int, ...]) -> "_Compiled":
        """The native code for inputs of a shape, with the current weights."""
        if shape not in self._compiled:
            self._compiled[shape] = _Compiled(self.module, shape, self.index.numpy())
        code, bias = self._compiled[shape], self.module.bias
        values = self.module.weight.detach().reshape(-1)[code.index].numpy()
        code.runner.refill({code.product: (values, None if bias is None else bias.detach().numpy())})
        return code

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of all weights, kept or not, computed by torch."""
        module = self.module
        if isinstance(module, nn.Linear):
            return gradient.t() @ x
        geometry = module.stride, module.padding, module.dilation, False, (0, 0), module.groups
        wanted_gradients = (False, True, False)  # of input, weight, bias
        backward: Any = torch.ops.aten.convolution_backward
        return backward(gradient, x, module.weight, None, *geometry, wanted_gradients)[1]  # type: ignore[no-any-return]


class _Compiled:
    """A layer for inputs of one shape; `index` is the position of each tap's weight."""

    def __init__(self, module: Any, shape: tuple[int, ...], index: Any) -> None:
        weight = Stored(tuple(module.weight.shape), index, np.zeros(len(index), np.float32))
        tensors: dict[str, Any] = {"weight": weight}
        attributes: dict[str, Any] = {}
        if module.bias is not None:
            tensors["bias"] = module.bias.detach().numpy()
        if isinstance(module, nn.Conv2d):
            attributes = {key: list(getattr(module, key)) for key in ("stride", "padding", "dilation")}
            attributes["groups"] = module.groups
        node = Node("layer", "conv" if attributes else "linear", ("input",), (), {r: r for r in tensors}, attributes)
        meta, x = {role: getattr(module, role).to("meta") for role in tensors}, torch.empty(1, *shape, device="meta")
        self.shape = tuple(reference.step(node, [x], meta, x).shape[1:])
        nodes = Node("input", "input", (), shape), replace(node, shape=self.shape)
        (stage,) = stages(Graph(nodes, "layer"), tensors)
        kernels = bindings.kernels()
        assert isinstance(stage, Stage) and kernels is not None
        self.runner = Runner(stage, kernels, torch.get_num_threads())
        self.product = next(operation for operation in stage.operations if isinstance(operation, Product))
        self.index = torch.from_numpy(self.product.taps.index)


class _Sparse(torch.autograd.Function):
    """A sparse layer with its gradients, for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
        code = layer.compiled(tuple(x.shape[1:]))
        ctx.layer, ctx.code, ctx.has_bias = layer, code, bias is not None
        ctx.save_for_backward(x, weight)
        output, ctx.kept = code.runner.forward(_rows(x), keep=layer.mask is None)
        # Reshaped in numpy: a view made by torch could not be overwritten in place by the next layer.
        return torch.from_numpy(output.reshape(len(x), *code.shape))

    @staticmethod
    @once_differentiable  # else a second derivative would silently be zero
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), layer, code = ctx.saved_tensors, ctx.layer, ctx.code
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        weight_gradient = input_gradient = None
        if layer.mask is None:
            input_gradient = code.runner.backward(_rows(gradient), ctx.kept) if needs_input else None
            weight_gradient = layer.weight_gradient(x, gradient) if needs_weight else None
        else:
            input_gradient, values = code.runner.learn(_rows(gradient), _rows(x))
            weight_gradient = torch.zeros(weight.numel()).index_copy_(0, code.index, torch.from_numpy(values))
            weight_gradient = weight_gradient.view_as(weight)
        bias_gradient = gradient.sum([0, *range(2, gradient.ndim)]) if ctx.has_bias and needs_bias else None
        if input_gradient is not None:
            input_gradient = torch.from_numpy(input_gradient.reshape(x.shape))
        return input_gradient, weight_gradient, bias_gradient, None


def _rows(x: Tensor) -> Any:
    return x.detach().contiguous().view(len(x), -1).numpy()
