"""The training pass of a pruned network: its layers compute with the weights that are kept, also backwards.

A layer's output, the gradient of its input and the gradients of its kept weights are products over the kept weights
alone. What lies between the layers, batch norms in training mode above all, is left to torch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from harp.sparse import native
from harp.sparse.follower import wanted
from harp.sparse.graph import Graph, Node
from harp.sparse.lowering import Product, Stage, stages
from harp.sparse.runner import Learner
from harp.sparse.taps import Weight

# The share of kept weights up to which a layer is faster this way, its input and output being packed and unpacked:
# measured on the layers of ResNet18, forwards and backwards. Where the weights change their places at every step, the
# programs are made anew every time, which has to be made up for.
SPARSE_ENOUGH, SPARSE_ENOUGH_TO_CHANGE = 0.2, 0.05
WORTH = 1 << 14  # weights of a layer below which there is nothing to gain


class SparseForward:
    """A model's forward pass in which sparse layers compute sparsely, on CPUs that the engine has native code for.

    Arguments:
        forward: what computes the pass, the model or a wrapper around it.
        masks: those that stay, by parameter name: gradients of other weights are zero then. Without masks the gradients
            of all weights are computed, and what is zero counts as pruned.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[[Tensor], Any], masks: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.forward, self.masks = model, forward, masks
        self._layers: dict[str, _Layer] = {}

    def __call__(self, x: Tensor) -> Any:
        """What the model gives for a batch."""
        suits = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not suits or wanted() == "off":
            return self.forward(x)
        with _in_place(self._sparse_layers()):
            return self.forward(x)

    def _sparse_layers(self) -> dict[nn.Module, "_Layer"]:
        """The layers that are sparse at present."""
        limit = SPARSE_ENOUGH_TO_CHANGE if self.masks is None else SPARSE_ENOUGH
        found = {}
        for name, module in self.model.named_modules():
            if not _is_known(module) or module.weight.numel() < WORTH:
                continue
            mask = None if self.masks is None else self.masks.get(f"{name}.weight")
            known = self._layers.get(name)
            if known is None or not known.holds(mask):
                kept = module.weight.detach() if mask is None else mask
                if int(kept.count_nonzero()) > limit * kept.numel():
                    self._layers.pop(name, None)
                    continue
                known = self._layers[name] = _Layer(module, kept.reshape(-1).nonzero().reshape(-1), mask)
            found[module] = known
        return found


def _is_known(module: Any) -> bool:
    if parametrize.is_parametrized(module) or "forward" in vars(module):
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


@contextmanager
def _in_place(layers: Mapping[nn.Module, "_Layer"]) -> Iterator[None]:
    """Let modules compute by their sparse layers."""
    try:
        for module, layer in layers.items():
            module.forward = layer  # an attribute of this one module, gone at the end
        yield
    finally:
        for module in layers:
            vars(module).pop("forward", None)


class _Layer:
    """A convolution or linear layer by the weights at some places."""

    def __init__(self, module: Any, index: Tensor, mask: Tensor | None) -> None:
        self.module, self.index, self.mask = module, index, mask
        self._compiled: dict[tuple[int, ...], _Compiled] = {}

    def holds(self, mask: Tensor | None) -> bool:
        """Whether the places are still those of the mask; without one, of the weights that are not zero."""
        if mask is not None or self.mask is not None:
            return mask is self.mask
        weight = self.module.weight.detach().reshape(-1)
        return int(weight.count_nonzero()) == len(self.index) and bool(weight[self.index].all())

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if x.ndim != (4 if isinstance(module, nn.Conv2d) else 2) or x.dtype != torch.float32 or len(x) == 0:
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        found: Tensor = _Sparse.apply(x, module.weight, module.bias, self)  # type: ignore[no-untyped-call]
        return found

    def compiled(self, shape: tuple[int, ...]) -> "_Compiled":
        """The native code for inputs of a shape, with the present weights."""
        if shape not in self._compiled:
            self._compiled[shape] = _Compiled(self.module, shape, self.index.numpy())
        code, bias = self._compiled[shape], self.module.bias
        values = self.module.weight.detach().reshape(-1)[code.index].numpy()
        code.learner.refill({code.product: (values, None if bias is None else bias.detach().numpy())})
        return code

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of all weights, by torch."""
        module = self.module
        if isinstance(module, nn.Linear):
            return gradient.t() @ x
        how = module.stride, module.padding, module.dilation, False, (0, 0), module.groups
        found: Tensor
        _, found, _ = torch.ops.aten.convolution_backward(gradient, x, module.weight, None, *how, (False, True, False))
        return found


class _Compiled:
    """A layer for inputs of one shape; `index` says which weight each of its products has."""

    def __init__(self, module: Any, shape: tuple[int, ...], index: Any) -> None:
        weight = Weight(tuple(module.weight.shape), index, np.zeros(len(index), np.float32))
        tensors: dict[str, Any] = {"weight": weight}
        attributes: dict[str, Any] = {}
        if module.bias is not None:
            tensors["bias"] = module.bias.detach().numpy()
        if isinstance(module, nn.Conv2d):
            attributes = {key: list(getattr(module, key)) for key in ("stride", "padding", "dilation")}
            attributes["groups"] = module.groups
        self.shape = _made(module, shape)
        op = "conv" if attributes else "linear"
        roles = {role: role for role in tensors}
        nodes = Node("input", "input", (), shape), Node("layer", op, ("input",), self.shape, roles, attributes)
        (stage,) = stages(Graph(nodes, "layer"), tensors)
        fit = native.kernels()
        assert isinstance(stage, Stage) and fit is not None
        self.learner = Learner(stage, fit, torch.get_num_threads())
        self.product = next(each for each in stage.operations if isinstance(each, Product))
        self.index = torch.from_numpy(self.product.taps.index)


def _made(module: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a layer's output."""
    if isinstance(module, nn.Linear):
        return (module.out_features,)
    sizes = zip(shape[1:], module.kernel_size, module.stride, module.padding, module.dilation, strict=True)
    return (module.out_channels, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))


class _Sparse(torch.autograd.Function):
    """A layer's output, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
        code = layer.compiled(tuple(x.shape[1:]))
        ctx.layer, ctx.code, ctx.has_bias = layer, code, bias is not None
        ctx.save_for_backward(x, weight)
        made, ctx.kept = code.learner.forward(_rows(x), keep=layer.mask is None)
        return torch.from_numpy(made.reshape(len(x), *code.shape))  # no view of torch's: it may be overwritten

    @staticmethod
    @once_differentiable  # a second derivative would be zero in silence
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), layer, code = ctx.saved_tensors, ctx.layer, ctx.code
        deeper, learns, shifts, _ = ctx.needs_input_grad
        found = back = None
        if layer.mask is None:
            back = code.learner.backward(_rows(gradient), ctx.kept) if deeper else None
            found = layer.weight_gradient(x, gradient) if learns else None
        else:
            back, values = code.learner.learn(_rows(gradient), _rows(x), deeper=deeper)
            found = torch.zeros(weight.numel()).index_copy_(0, code.index, torch.from_numpy(values)).view_as(weight)
        bias = gradient.sum([0, *range(2, gradient.ndim)]) if ctx.has_bias and shifts else None
        return None if back is None else torch.from_numpy(back.reshape(x.shape)), found, bias, None


def _rows(x: Tensor) -> Any:
    return x.detach().contiguous().view(len(x), -1).numpy()
