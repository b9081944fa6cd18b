"""The network while it stands still.

An attack asks one network for many gradients with respect to the *input*: in eval mode, and no weight changes
in between. Then a cheaper function of the input that has the same values can be asked instead:

* a batch norm in eval mode is an affine map per channel, so it goes into the layer before it,

      γ (Wx + b − μ) / √(σ² + ε) + β  =  (sW) x + s (b − μ) + β      with  s = γ / √(σ² + ε);

* on a CPU convolutions are faster with the channels last in memory, save for small feature maps on some;
* a ReLU or a sum may overwrite the result of a convolution that nobody else reads;
* a ReLU between a convolution and a max pooling has the same values behind it, of fewer numbers;
* the gradient of an image of few channels is faster as a matrix product and shifted sums than as a convolution.

What does not fit is left as it is, and a model that can't be traced is simply called. A pruned network is computed by
the sparse engine where that is faster: by the count of its operations, so that the choice is the same every time.
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
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.modules import module as everywhere
from torch.nn.utils import parametrize

from harp.errors import ModelError
from harp.models.agreement import TOLERANCE, disagreement
from harp.models.modes import Logits, evaluating

if TYPE_CHECKING:
    from harp.engine.follower import Follower

_log = logging.getLogger("harp")

# The height of a feature map from which on channels_last is faster, measured per layer: the kernels of AVX-512
# lose half their speed with it at 4 x 4, those of AVX2 gain at every size.
_CHANNELS_LAST_FROM = {"AVX512": 8, "AVX2": 1}

# A multiplication of the sparse engine, and the effort for every output, against a multiplication of the dense library:
# measured with AVX2, 36 against 80 billion operations a second, and 0.1 nanoseconds an output.
_SPARSE_COST, _OUTPUT_COST = 2.2, 4.0
_GAIN = 0.8  # it must be so much less
WORTH = 2e6  # multiplications of an image below which finding out what the model computes is not worth it

_THIN = 3  # input channels up to which the library is slow with gradients

_CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_RELUS = (torch.relu, F.relu)
_ADDS = (operator.add, operator.iadd, torch.add)
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.jit.ScriptModule)
_WRAPPED = {"_orig_mod", "_forward_module"}  # what torch.compile and lightning wrap
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def frozen(model: nn.Module, example: Tensor, *, fast: bool = True) -> Iterator[Logits]:
    """Put `model` into eval mode and give a function from images to logits, for gradients of the input only.

    The weights are read at entry: they must not change while the context is open. At exit every module has
    the training flag it had at entry, also after an exception; no parameter, buffer, gradient or
    `requires_grad` is touched. `example` is a batch of the images to come; `fast=False` gives the model itself.
    """
    with evaluating(model):
        yield (_folded(model, example) if fast else None) or model


@dataclass
class _Plan:
    """The rewritten graph of a model, if there is one, and what it holds for; never the model: it may go."""

    graph: fx.GraphModule | None
    parts: tuple[weakref.ref[Any], ...]
    settings: tuple[Any, ...]
    follower: "Follower | None" = None  # the sparse engine, once it is worth it
    refused: bool = False  # it can't be had for this model


_plans: weakref.WeakKeyDictionary[nn.Module, _Plan] = weakref.WeakKeyDictionary()


@torch.inference_mode(False)
def _folded(model: nn.Module, example: Tensor) -> Logits | None:
    """A faster network with the weights of this moment; None if the plain model has to do."""
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
        return _followed(plan, model, example)
    if known:
        _refold(plan.graph)
    return plan.graph


def _is_sparse(graph: fx.GraphModule, example: Tensor) -> bool:
    """Whether the sparse engine is the faster one for this network, by the multiplications that are left."""
    from harp.engine.follower import wanted  # here, since whoever only names an attack does without the engine

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


def _followed(plan: _Plan, model: nn.Module, example: Tensor) -> Logits | None:
    """The sparse engine with the weights of this moment; the rewritten graph if there is none for this model."""
    from harp.engine.follower import Follower

    assert plan.graph is not None
    try:
        if plan.follower is None:
            follower = Follower(model, example[:8])
            follower.follow(model)
            if said := disagreement(follower, model, example[:8]):
                raise ModelError(said)
            plan.follower = follower
        else:
            plan.follower.follow(model)
    except (ModelError, OverflowError) as error:  # its graph can't be had, or a layer is too large
        _log.debug("the model is attacked without the sparse engine: %s", error)
        plan.refused = True
        _refold(plan.graph)
        return plan.graph
    return plan.follower


def _refold(graph: fx.GraphModule) -> None:
    for layer in (child for child in graph.children() if isinstance(child, FoldedLayer)):
        layer.fold()


def _is_plain(model: nn.Module) -> bool:
    """Whether a call means the modules' own forward methods and nothing else, so that tracing sees it all."""
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
    """A convolution or linear layer and the batch norm behind it (if any) as one affine map."""

    def __init__(self, layer: Any, norm: Any, layouts: tuple[Any, Any]) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm
        self.before, self.after = layouts
        self.thin = self.before is not None and _is_thin(layer)
        self.weight: Tensor = layer.weight.detach()
        if norm is not None:  # memory that serves at every entry: new pages would cost as much as the folding
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
        """The result of both, in the memory format that comes next."""
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
    """A convolution of images of few channels: a gradient for the images only, faster than by the library.

    Input i, j gets w[:, :, a, b] · gradient from every output that read it as its pixel a, b. The products are one
    matrix product for all; each a, b adds its part of them, shifted.
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


def _is_thin(layer: Any) -> bool:
    """Whether a layer is a plain convolution of a grey or coloured image."""
    plain = type(layer) is nn.Conv2d and layer.groups == 1 and set(layer.dilation) == {1}
    return plain and layer.in_channels <= _THIN and not isinstance(layer.padding, str)


def _build(model: nn.Module, example: Tensor) -> fx.GraphModule | None:
    """Trace, rewrite and check; None if the model can't be traced or the rewritten one is another function."""
    try:
        with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
            traced = _trace(model)
            ShapeProp(traced).propagate(example)
            _rewrite(traced, choose_layout=example.device.type == "cpu" and example.dtype == torch.float32)
        said = disagreement(traced, model, example)
    except Exception as error:  # forward may do anything: whatever went wrong, there's no graph of it
        _log.debug("the model is attacked as it is, it can't be traced: %s", error)
        return None
    if said:
        _log.warning("the folded network is another function, %s: the model is attacked as it is", said)
        return None
    return traced


def _trace(model: nn.Module) -> fx.GraphModule:
    attributes = set(vars(model))
    tracer = fx.Tracer()
    tracer.proxy_buffer_attributes = True  # else what forward computes of a buffer would be a constant
    try:
        traced = fx.GraphModule(model, tracer.trace(model))
    finally:
        made = vars(model).keys() - attributes  # tensors that forward makes are left on the model by the tracer
        for name in made:
            delattr(model, name)
    if made:  # of what, nobody knows
        raise TypeError("forward creates tensors of its own")
    return traced


def _rewrite(traced: fx.GraphModule, *, choose_layout: bool) -> None:
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    fresh: set[fx.Node] = set()  # results that may be overwritten: no gradient needs their values
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
            fresh.add(node)
        elif _overwrites(node, module, fresh) and node.target == "add_":  # of a ReLU the gradient needs the result
            fresh.add(node)
        elif type(module) is nn.MaxPool2d and _shape(node):
            _pool_first(node)
    traced.recompile()


def _pool_first(pool: fx.Node) -> None:
    """Let a ReLU that only a max pooling reads come behind it: it does not change which number is the largest."""
    (relu,) = pool.all_input_nodes
    if relu.target == "relu_" and len(relu.users) == 1:
        pool.replace_all_uses_with(relu)
        pool.replace_input_with(relu, relu.all_input_nodes[0])
        relu.args = (pool,)
        relu.meta = pool.meta
        pool.append(relu)


def _is_layer(module: nn.Module, node: fx.Node) -> bool:
    if type(module) is nn.Linear:  # of a sequence, a batch norm would take another axis for the channels
        return len(_shape(node)) == 2
    return type(module) in _CONVOLUTIONS and module.padding_mode == "zeros"


def _norm_behind(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The batch norm with running statistics that is the only reader of a layer."""
    readers = [reader for reader in node.users if reader.op == "call_module" and len(node.users) == 1]
    norms = [modules[str(reader.target)] for reader in readers]
    return readers[0] if norms and type(norms[0]) in _NORMS and norms[0].running_var is not None else None


def _overwrites(node: fx.Node, module: nn.Module | None, fresh: set[fx.Node]) -> bool:
    """Let a ReLU or a sum write into an input that nobody else reads."""
    inputs = node.all_input_nodes
    relu = type(module) is nn.ReLU or node.target in _RELUS
    add = node.target in _ADDS and len(inputs) == 2 and not node.kwargs
    writable = inputs[:1] if node.target is operator.iadd else inputs
    free = next((each for each in writable if each in fresh and len(each.users) == 1), None)
    if free is None or not (relu or (add and _shape(inputs[0]) == _shape(inputs[1]))):
        return False
    node.op, node.target, node.kwargs = "call_method", "relu_" if relu else "add_", {}
    node.args = (free, *(each for each in inputs if each is not free))
    return True


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("tensor_meta"), "shape", ()))


def _layouts(node: fx.Node) -> tuple[torch.memory_format | None, torch.memory_format | None]:
    """The memory formats of a convolution's input and output, None where there is no choice to make."""
    before, after = _shape(node.all_input_nodes[0]), _shape(node)
    smallest = _CHANNELS_LAST_FROM.get(torch.backends.cpu.get_cpu_capability())
    if smallest is None or len(before) != 4:
        return None, None
    formats = torch.contiguous_format, torch.channels_last
    return formats[before[2] >= smallest], formats[after[2] >= smallest]
