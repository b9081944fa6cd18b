"""A faster function with the values of a network whose weights do not change.

An attack needs many gradients of one network with respect to its *input*, in eval mode. So the network is rewritten:

* a batch norm in eval mode is an affine map per channel and is folded into the layer before it,

      γ (Wx + b − μ) / √(σ² + ε) + β  =  (sW) x + s (b − μ) + β      with  s = γ / √(σ² + ε);

* convolutions on a CPU use the channels-last memory format, except for small feature maps where that is slower;
* a ReLU or a sum overwrites the result of a convolution that nothing else reads;
* a ReLU before a max pooling is moved behind it, where there are fewer numbers;
* the gradient of an image with few channels is computed as a matrix product and shifted sums.

Other operations stay as they are, and a model that can't be traced is used itself. A pruned network is computed by the
sparse engine if that is faster by the count of operations, so the choice is the same every time.
"""

import logging
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules import module as everywhere
from torch.nn.utils import parametrize

from harp.errors import ModelError
from harp.models.agreement import TOLERANCE, disagreement
from harp.models.modes import Logits, evaluating
from harp.system.files import reason

if TYPE_CHECKING:
    from harp.engine.follower import Follower

_log = logging.getLogger("harp")

# The smallest height of a feature map for which channels_last is faster, measured per layer: with AVX-512 it is half as
# fast at 4 x 4, with AVX2 it is faster at every size.
_CHANNELS_LAST_FROM = {"AVX512": 8, "AVX2": 1}

# The cost of a multiplication and of an output in the sparse engine, in multiplications of the dense library: measured
# with AVX2, 36 and 80 billion multiplications a second, and 0.1 nanoseconds for an output.
_SPARSE_COST, _OUTPUT_COST = 2.2, 4.0
_GAIN = 0.8  # the sparse engine is used if its cost is below this share of the dense cost
WORTH = 2e6  # multiplications for an image below which the sparse engine is not worth its preparation

_THIN = 3  # input channels up to which torch is slow with gradients

_CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_RELUS = (torch.relu, F.relu)
_ADDS = (operator.add, operator.iadd, torch.add)
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.jit.ScriptModule)
_WRAPPED = {"_orig_mod", "_forward_module"}  # the inner modules of torch.compile and of Lightning
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def frozen(model: nn.Module, example: Tensor, *, fast: bool = True) -> Iterator[Logits]:
    """Put `model` into eval mode and return a function from images to logits, for gradients of the input only.

    The weights are read at entry and must not change in the context. At exit every module has the training flag it had
    at entry, also after an exception; parameters, buffers and gradients do not change. `example` is a batch of images;
    `fast=False` returns the model itself.
    """
    with evaluating(model):
        yield (_folded(model, example) if fast else None) or model


@dataclass
class _Plan:
    """The rewritten graph of a model, if there is one, and what it is valid for. It does not keep the model alive."""

    graph: fx.GraphModule | None
    parts: tuple[weakref.ref[Any], ...]
    settings: tuple[Any, ...]
    follower: "Follower | None" = None  # the sparse engine, once it is used
    refused: bool = False  # whether the sparse engine can't compute this model

    def follow(self, model: nn.Module, example: Tensor) -> "Follower":
        """The sparse engine with the current weights."""
        from harp.engine.follower import Follower

        follower = self.follower or Follower(model, example)
        follower.follow(model)
        if self.follower is None and (difference := disagreement(follower, model, example)):
            raise ModelError(difference)
        self.follower = follower
        return follower


_plans: weakref.WeakKeyDictionary[nn.Module, _Plan] = weakref.WeakKeyDictionary()


@torch.inference_mode(False)
def _folded(model: nn.Module, example: Tensor) -> Logits | None:
    """A faster network with the current weights; None if there is none for this model."""
    if example.dtype not in TOLERANCE or len(example) == 0 or not _is_plain(model):
        return None
    parts, settings = _parts_and_settings(model)
    settings = (example.shape[1:], example.dtype, example.device, *settings)
    plan = _plans.get(model)
    known = plan is not None and plan.settings == settings
    if plan is None or not known or [id(ref()) for ref in plan.parts] != [id(part) for part in parts]:
        plan, known = _Plan(_build(model, example[:8]), tuple(map(weakref.ref, parts)), settings), False
        _plans[model] = plan
    if plan.graph is None:
        return None
    if not plan.refused and _is_sparse(plan.graph, example):
        try:
            return plan.follow(model, example[:8])
        except (ModelError, OverflowError) as error:  # an operation that it does not have, or a layer that is too large
            _log.debug("the model is attacked without the sparse engine: %s", error)
            plan.refused = True
    if known:
        for layer in plan.graph.children():
            if isinstance(layer, FoldedLayer):
                layer.fold()
    return _WithFallback(plan, model)


def _is_sparse(graph: fx.GraphModule, example: Tensor) -> bool:
    """Whether the sparse engine is faster for this network, by the number of nonzero weights."""
    from harp.engine.follower import wanted  # not at the top: the engine takes long to import

    if wanted() == "off" or example.device.type != "cpu" or example.dtype != torch.float32:
        return False
    dense = sparse = 0.0
    for node in graph.graph.nodes:
        layer = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, FoldedLayer):
            weight = layer.layer.weight
            outputs = math.prod(_shape(node)[1:])
            dense += outputs * weight[0].numel()
            sparse += outputs * (float(weight.count_nonzero()) / len(weight) * _SPARSE_COST + _OUTPUT_COST)
    return wanted() == "always" or (sparse < _GAIN * dense and dense >= WORTH)


def _is_plain(model: nn.Module) -> bool:
    """Whether a call of the model runs the forward methods of its modules and nothing else that tracing would miss."""
    return not any(getattr(everywhere, f"_global{name}") for name in _HOOKS) and not any(
        isinstance(module, _WRAPPERS)
        or not _WRAPPED.isdisjoint(module._modules)
        or "forward" in vars(module)
        or any(getattr(module, name) for name in _HOOKS)
        or parametrize.is_parametrized(module)
        for module in model.modules()
    )


def _parts_and_settings(model: nn.Module) -> tuple[list[Any], tuple[Any, ...]]:
    """What a trace takes for constant: the modules, their tensors, and their plain attributes."""
    parts: list[Any] = list(model.modules())[1:]
    settings: list[Any] = []
    for module in model.modules():
        for key, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
            if isinstance(value, Tensor):
                parts.append(value)
            elif value is None or isinstance(value, (bool, int, float, str)):
                settings.append((key, value))
    return parts, tuple(settings)


class FoldedLayer(nn.Module):
    """A convolution or linear layer and the batch norm behind it, if there is one, as one affine map."""

    def __init__(self, layer: Any, norm: Any, layouts: tuple[Any, Any]) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm
        self.before, self.after = layouts
        plain = type(layer) is nn.Conv2d and layer.groups == 1 and set(layer.dilation) == {1}
        few = plain and layer.in_channels <= _THIN and not isinstance(layer.padding, str)
        self.thin = few and self.before is not None
        self.weight: Tensor = layer.weight.detach()
        if norm is not None:  # reused at every entry: new memory would cost as much as the folding
            self.weight = torch.empty_like(self.weight, memory_format=self.before or torch.preserve_format)
        self.fold()

    @torch.no_grad()
    def fold(self) -> None:
        """Compute the weights from the layer and the statistics of the norm."""
        weight, bias, norm = self.layer.weight.detach(), self.layer.bias, self.norm
        if norm is not None:
            scale = torch.rsqrt(norm.running_var + norm.eps)
            scale = scale if norm.weight is None else scale * norm.weight
            shift = norm.running_mean if bias is None else norm.running_mean - bias
            bias = -shift * scale if norm.bias is None else norm.bias - shift * scale
            self.weight.copy_(weight).mul_(scale.reshape(-1, *[1] * (weight.ndim - 1)))
        else:
            self.weight = weight if self.before is None else weight.contiguous(memory_format=self.before)
        self.bias: Tensor | None = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """The result of both, in the memory format of the next layer."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return F.linear(x, self.weight, self.bias)
        x = x if self.before is None else x.contiguous(memory_format=self.before)
        if self.thin and x.requires_grad and torch.is_grad_enabled():
            y = thin_convolution(x, self.weight, self.bias, layer.stride, layer.padding)
        else:
            convolve = _CONVOLUTIONS[type(layer)]
            y = convolve(x, self.weight, self.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        return y if self.after is None else y.contiguous(memory_format=self.after)


class _ThinConvolution(torch.autograd.Function):
    """A convolution of images with few channels, and a fast gradient for the images only.

    An input gets w[:, :, a, b] · gradient from every output that read it at the position a, b of its kernel. These are
    computed by one matrix product, and added up with a shift for each a, b.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = x.shape, stride, padding
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight,) = ctx.saved_tensors
        (count, channels, height, width), stride, (above, beside) = ctx.geometry
        down, across = gradient.shape[2:]
        rows = gradient.permute(0, 2, 3, 1).reshape(-1, len(weight))
        parts = (weight.flatten(1).t() @ rows.t()).view(*weight.shape[1:], count, down, across)
        total = gradient.new_zeros(channels, count, height + 2 * above, width + 2 * beside)
        for a, b in product(*map(range, weight.shape[2:])):
            lines, columns = (
                slice(at, at + step * (n - 1) + 1, step)
                for at, step, n in zip((a, b), stride, (down, across), strict=True)
            )
            total[:, :, lines, columns].add_(parts[:, a, b])
        inner = total[:, :, above : above + height, beside : beside + width].transpose(0, 1)
        return inner.contiguous(), None, None, None, None


thin_convolution: Callable[..., Tensor] = _ThinConvolution.apply


class _Shapes(fx.Interpreter):
    """Runs a traced network and notes the shape of every result."""

    def run_node(self, n: fx.Node) -> Any:
        """The result of a node."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["shape"] = tuple(result.shape)
        return result


class _WithFallback:
    """The rewritten network; if it fails on some batch, the model itself from then on."""

    def __init__(self, plan: _Plan, model: nn.Module) -> None:
        self.plan, self.model = plan, model

    def __call__(self, x: Tensor) -> Tensor:
        """The logits of images."""
        graph = self.plan.graph
        if graph is None:
            return self.model(x)  # type: ignore[no-any-return]
        try:
            return graph.forward(x)  # type: ignore[no-any-return]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # forward may do anything, such as view a tensor that has another layout here
            answer: Tensor = self.model(x)  # if it fails as well, that is the error to show
            self.plan.graph = None
            _log.warning("the model is attacked as it is, because its folded form fails: %s", reason(error))
            return answer


def _build(model: nn.Module, example: Tensor) -> fx.GraphModule | None:
    """Trace, rewrite and check; None if the model can't be traced or the rewritten one computes something else."""
    try:
        with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
            traced = _trace(model)
            _Shapes(traced).run(example)
            _rewrite(traced, choose_layout=example.device.type == "cpu" and example.dtype == torch.float32)
        difference = disagreement(traced.forward, model, example)  # a call would print what goes wrong
    except Exception as error:  # forward may do anything
        _log.debug("the model is attacked as it is, because it can't be traced: %s", error)
        return None
    if difference:
        _log.warning("the model is attacked as it is, because its folded form differs: %s", difference)
    return None if difference else traced


def _trace(model: nn.Module) -> fx.GraphModule:
    attributes = set(vars(model))
    tracer = fx.Tracer()
    tracer.proxy_buffer_attributes = True  # otherwise what forward computes from a buffer would be a constant
    try:
        traced = fx.GraphModule(model, tracer.trace(model))
    finally:
        constants = vars(model).keys() - attributes  # the tracer stores tensors that forward creates on the model
        for name in constants:
            delattr(model, name)
    if constants:  # they may depend on anything
        raise TypeError("forward creates tensors of its own")
    return traced


def _rewrite(traced: fx.GraphModule, *, choose_layout: bool) -> None:
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    free: set[fx.Node] = set()  # results that may be overwritten: no gradient needs their values
    for node in list(traced.graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if module is not None and calls[node.target] == 1 and _is_layer(module, node):
            norm = _norm_behind(node, modules)
            layouts = _layouts(node) if choose_layout else (None, None)
            node.target = f"folded_{node.name}"
            traced.add_submodule(node.target, FoldedLayer(module, norm and modules[str(norm.target)], layouts))
            if norm:
                norm.replace_all_uses_with(node)
                traced.graph.erase_node(norm)
            free.add(node)
        elif _overwrites(node, module, free) and node.target == "add_":  # the gradient of a ReLU needs its result
            free.add(node)
        elif type(module) is nn.MaxPool2d and _shape(node):
            _pool_first(node)
    traced.recompile()


def _pool_first(pool: fx.Node) -> None:
    """Move a ReLU that only a max pooling reads behind it: it does not change which number is the largest."""
    (relu,) = pool.all_input_nodes
    if relu.target == "relu_" and len(relu.users) == 1:
        pool.replace_all_uses_with(relu)
        pool.replace_input_with(relu, relu.all_input_nodes[0])
        relu.args = (pool,)
        relu.meta = pool.meta
        pool.append(relu)


def _is_layer(module: nn.Module, node: fx.Node) -> bool:
    if type(module) is nn.Linear:  # not on sequences: a batch norm behind has its channels on another axis
        return len(_shape(node)) == 2
    return type(module) in _CONVOLUTIONS and module.padding_mode == "zeros"


def _norm_behind(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The batch norm with running statistics that is the only reader of a layer, if there is one."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    norm = modules[str(reader.target)] if reader is not None and reader.op == "call_module" else None
    return reader if type(norm) in _NORMS and norm.running_var is not None else None  # type: ignore[union-attr]


def _overwrites(node: fx.Node, module: nn.Module | None, free: set[fx.Node]) -> bool:
    """Let a ReLU or a sum overwrite an input that nothing else reads, if there is one; whether it does."""
    inputs = node.all_input_nodes
    relu = type(module) is nn.ReLU or node.target in _RELUS
    add = node.target in _ADDS and len(inputs) == 2 and not node.kwargs
    writable = inputs[:1] if node.target is operator.iadd else inputs
    target = next((one for one in writable if one in free and len(one.users) == 1), None)
    if target is None or not (relu or (add and _shape(inputs[0]) == _shape(inputs[1]))):
        return False
    node.op, node.target, node.kwargs = "call_method", "relu_" if relu else "add_", {}
    node.args = (target, *(one for one in inputs if one is not target))
    return True


def _shape(node: fx.Node) -> tuple[int, ...]:
    return node.meta.get("shape", ())  # type: ignore[no-any-return]


def _layouts(node: fx.Node) -> tuple[torch.memory_format | None, torch.memory_format | None]:
    """The memory formats of a convolution's input and output; None where they stay as they are."""
    before, after = _shape(node.all_input_nodes[0]), _shape(node)
    smallest = _CHANNELS_LAST_FROM.get(torch.backends.cpu.get_cpu_capability())
    if smallest is None or len(before) != 4:
        return None, None
    formats = torch.contiguous_format, torch.channels_last
    return formats[before[2] >= smallest], formats[after[2] >= smallest]
