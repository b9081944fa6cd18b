"""What a network costs: multiply-accumulates (MACs) for one image, parameters, bytes; dense, and of the kept weights.

A weight of a convolution or a matrix product is multiplied once for every position that it is applied at,

    MACs = positions · weights          kept MACs = positions · kept weights

with the positions of the output, or of the input for a transposed convolution. The model runs once, and every operation
is seen at PyTorch's dispatcher, so it does not matter whether a layer, a function or a bare parameter does the work. A
product with a weight is known by the memory that it reads: a view of a parameter is a part of it, entry by entry. So
what pruning saves is known exactly. A weight that is computed from one parameter (weight norm, standardisation)
counts for that parameter, and its zeros save work; one that is no parameter, such as a fixed blur, counts as kept.

Positions in the padding count, as is usual. Norms, activations, biases and other products entry by entry do not.
Products of two activations, such as queries with keys, are counted apart: no mask makes them fewer.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harp.errors import ModelError
from harp.models.inputs import Inputs, ask, copied, described, first_rows, tensors
from harp.models.modes import slow_attention, untouched
from harp.pruning.masks import check_shapes
from harp.pruning.operations import Call, Watcher, aten
from harp.pruning.prunable import check_readable

_INDEX = 4  # bytes of the index that says where a kept weight belongs

# Matrix products: the positions of the two factors among the arguments.
_PRODUCTS = {
    aten.mm: (0, 1), aten.addmm: (1, 2), aten._addmm_activation: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2),
    aten.addbmm: (1, 2), aten.mv: (0, 1), aten.addmv: (1, 2), aten.dot: (0, 1), aten.vdot: (0, 1),
    aten.linear: (0, 1),
}  # fmt: skip
_OF_VECTORS = {aten.mv, aten.addmv, aten.dot, aten.vdot}
_BACKENDS: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)  # with kernels for whole recurrent layers
_CONVOLUTIONS = (aten.convolution, aten._convolution)


def cost(
    model: nn.Module, example: Sequence[int] | Inputs, masks: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """The cost of a model for one image of a shape (channels, height, width), as plain numbers.

    A model that takes something else is given an example of it. Masks say which weights are kept; layers without one
    are dense. Without any masks the weights that are zero count as pruned. What is used twice is counted twice in MACs
    and once in parameters. `products` are the MACs of two activations. `uncounted` names matrix-shaped parameters that
    no product was seen to use. `bytes_dense` are those of all parameters, `bytes_sparse` is an estimate: a kept value
    and a 32-bit index each, or dense where that is smaller; biases and norms as they are.
    """
    check_shapes(model, masks or {})
    check_readable(model)
    parameters = dict(model.named_parameters())
    kept = _kept(parameters, masks)
    work = _run(model, example)
    layers: list[dict[str, Any]] = []
    for name, weight in parameters.items():
        used = work.used.get(name)
        if used is not None:
            zeros_count = masks is None or name in masks
            layers.append({"name": name, "macs": used.macs, "macs_kept": used.kept(weight, kept[name], zeros_count)})
    counted = [name for name, weight in parameters.items() if weight.ndim > 1 or name in (masks or {})]
    counts = {name: int(kept[name].count_nonzero()) for name in counted}
    return {
        "macs": sum(layer["macs"] for layer in layers) + work.fixed,
        "macs_kept": sum(layer["macs_kept"] for layer in layers) + work.fixed,
        "products": work.products,
        "parameters": sum(weight.numel() for weight in parameters.values()),
        "parameters_kept": sum(counts.get(name, weight.numel()) for name, weight in parameters.items()),
        "bytes_dense": sum(weight.nbytes for weight in parameters.values()),
        "bytes_sparse": sum(
            min(weight.nbytes, counts.get(name, weight.numel()) * (weight.element_size() + _INDEX))
            for name, weight in parameters.items()
        ),
        "layers": layers,
        "uncounted": [name for name, weight in parameters.items() if weight.ndim > 1 and name not in work.used],
    }


def reduced(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of a dense network of which a smaller dense one is left."""
    left = {layer["name"]: layer["macs"] for layer in after["layers"]}
    return {
        **before,
        "macs_kept": after["macs"],
        "parameters_kept": after["parameters"],
        "bytes_sparse": after["bytes_dense"],
        "layers": [{**layer, "macs_kept": left.get(layer["name"], 0)} for layer in before["layers"]],
    }


def positions(model: nn.Module, example: Sequence[int] | Inputs) -> dict[str, int]:
    """How often each weight is applied to one image of a shape, or to another example, by parameter name.

    All weights of a tensor must be applied equally often: queries, keys and values that are packed into one tensor and
    come from sequences of different lengths are refused.
    """
    check_readable(model)
    parameters, applied = dict(model.named_parameters()), {}
    for name, used in _run(model, example).used.items():
        times = used.times(parameters[name])
        if len(times) > 1:
            raise ModelError(f"rows of {name!r} are applied {times} times: its weights have different prices")
        if times:
            applied[name] = times[0]
    return applied


def _kept(parameters: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """A mask for every parameter."""
    if masks is None:
        return {name: weight.detach() != 0 for name, weight in parameters.items()}
    dense = {
        name: torch.ones_like(weight, dtype=torch.bool) for name, weight in parameters.items() if name not in masks
    }
    return {**dense, **masks}


@dataclass(frozen=True)
class _View:
    """A part of a parameter as a product reads it, and the positions that it is applied at."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the parameter's first entry
    positions: int

    def of(self, laid_out: Tensor) -> Tensor:
        """The same part of a tensor in the parameter's memory layout."""
        return laid_out.as_strided(self.size, self.stride, self.offset)


@dataclass
class _Used:
    """How a parameter was used: in parts, or through a weight that is computed from it."""

    views: list[_View] = field(default_factory=list)
    computed: int = 0  # the MACs of weights that are computed, and how many of them have a weight that is not zero
    computed_kept: int = 0
    macs: int = 0

    def kept(self, weight: Tensor, mask: Tensor, zeros_count: bool) -> int:
        """The MACs under a mask; `zeros_count`: computed weights that are zero save work too."""
        laid_out = _like(weight, mask)
        left = sum(view.positions * int(view.of(laid_out).count_nonzero()) for view in self.views)
        return left + (self.computed_kept if zeros_count else self.computed)

    def times(self, weight: Tensor) -> list[int]:
        """How often the entries are applied, every number that occurs; none if that is not known entry by entry."""
        each, rest = divmod(self.computed, weight.numel())
        if rest:
            return []
        counts = _like(weight, torch.full((), each))
        for view in self.views:
            view.of(counts).add_(view.positions)
        return sorted(set(counts.flatten().tolist()))


def _like(weight: Tensor, values: Tensor) -> Tensor:
    """Values in a parameter's memory layout."""
    laid_out = torch.empty_strided(weight.shape, weight.stride(), dtype=values.dtype, device=values.device)
    return laid_out.copy_(values)


class _Work:
    """The products of a run."""

    def __init__(self, model: nn.Module) -> None:
        self.used: dict[str, _Used] = defaultdict(_Used)
        self.fixed = self.products = 0  # of weights that are no parameters, and of two activations
        # Parameters by the memory that they are in; several may share one.
        self.homes: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
        self.parameters = dict(model.named_parameters())
        for name, parameter in self.parameters.items():
            self.homes[_memory(parameter)].append((name, parameter))
        # What does not depend on the input, by its memory, and the parameters that it is computed from. The tensors are
        # kept, so that their memory is not used again.
        self.constants: dict[int, tuple[Tensor, frozenset[str]]] = {}
        for tensor in model.buffers():
            self.constants[_memory(tensor)] = (tensor, frozenset())

    def see(self, call: Call) -> None:
        """Count an operation if it is a product, and note what is computed from parameters."""
        if call.packet in _CONVOLUTIONS:
            x, weight = call.args[:2]
            counted = x if call.args[6] else call.outputs[0]  # transposed: every input is multiplied
            each = counted.numel() // counted.shape[1] if counted.shape[1] else 0
            self._add([weight], each * weight.numel())
        elif call.packet in _PRODUCTS:
            left, right = (call.args[place] for place in _PRODUCTS[call.packet])
            if call.packet in _OF_VECTORS and self._names(left) is not None and self._names(right) is not None:
                self._note(call)
                return  # the power iteration of a spectral norm, which is no work on the input
            columns = 1 if right.ndim == 1 or left.ndim == 1 else right.shape[-1]
            if call.packet is aten.linear:
                columns = len(right)
            # A row of features comes first, as in layers: among two parameters the right one is the weight.
            self._add([right, left], left.numel() * columns, computed=left.ndim < 3)  # attention is no layer
        self._note(call)

    def _note(self, call: Call) -> None:
        """Note what does not depend on the input."""
        known = [names for tensor in call.inputs if (names := self._names(tensor)) is not None]
        for tensor in call.outputs:
            if len(known) < len(call.inputs):
                self.constants.pop(_memory(tensor), None)  # written in place
            elif _memory(tensor) not in self.homes:
                self.constants[_memory(tensor)] = (tensor, frozenset[str]().union(*known))

    def _add(self, candidates: Sequence[Tensor], macs: int, *, computed: bool = True) -> None:
        """Count a product for the parameter that is one of its factors, or as one without a weight."""
        if not macs:
            return
        for tensor in candidates:
            found = self._parameter(tensor)
            if found is not None:
                self._add_view(*found, tensor, macs)
                return
        for tensor in candidates if computed else ():
            name = self._source(tensor)
            if name is not None:
                used = self.used[name]
                used.macs += macs
                used.computed += macs
                used.computed_kept += macs // tensor.numel() * int(tensor.count_nonzero())
                return
        if computed and any(self._names(tensor) is not None for tensor in candidates):
            self.fixed += macs
        else:
            self.products += macs

    def _add_view(self, name: str, parameter: Tensor, tensor: Tensor, macs: int) -> None:
        axes = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step]  # others are expanded
        size, stride = tuple(n for n, _ in axes), tuple(step for _, step in axes)
        first = int(tensor.storage_offset() - parameter.storage_offset())
        view = _View(size, stride, first, macs // math.prod(size))
        self.used[name].views.append(view)
        self.used[name].macs += macs

    def _parameter(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The parameter that a tensor is a view of."""
        for name, parameter in self.homes.get(_memory(tensor), ()):
            first = tensor.storage_offset() - parameter.storage_offset()
            if parameter.dtype == tensor.dtype and 0 <= first < parameter.numel():
                return name, parameter
        return None

    def _names(self, tensor: Tensor) -> frozenset[str] | None:
        """The parameters that a constant is computed from; None for what depends on the input."""
        found = self._parameter(tensor)
        if found is not None:
            return frozenset([found[0]])
        return self.constants.get(_memory(tensor), (None, None))[1]

    def _source(self, tensor: Tensor) -> str | None:
        """The one parameter whose values a computed weight has, changed by others or not."""
        names = self._names(tensor) or ()
        same = [name for name in names if self.parameters[name].numel() == tensor.numel()]
        matrices = [name for name in names if self.parameters[name].ndim > 1]
        return next((group[0] for group in (same, matrices) if len(group) == 1), None)


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's memory, which all its views share; unique as long as one of them is kept."""
    if tensor.layout != torch.strided or not tensor.numel():
        return -id(tensor)
    return tensor.untyped_storage().data_ptr()


def _run(model: nn.Module, example: Sequence[int] | Inputs) -> _Work:
    """Run the model on one grey image, or on the first example, in eval mode, and see its products."""
    inputs, words = _inputs(model, example)
    with torch.no_grad(), untouched(model), _in_parts(model):
        work = _Work(model)
        try:
            with Watcher(work.see):
                ask(model, inputs)
        except Exception as error:  # forward may do anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"the model can't run on {words}: {reason}") from error
    return work


def _inputs(model: nn.Module, example: Sequence[int] | Inputs) -> tuple[Inputs, str]:
    """What the model is called with, and how to call it in messages."""
    like = _first(model)
    if tensors(example):
        return copied(first_rows(example, 1), like), f"an example of {described(example)}"
    words = "x".join(map(str, example))
    if not all(isinstance(size, int) and size > 0 for size in example):
        raise ModelError(f"images can't have the shape {words}: give channels, height and width, like (3, 32, 32)")
    grey = torch.full((1, *example), 0.5, dtype=like.dtype, device=like.device)
    return grey, f"an image of shape {words}"


def _first(model: nn.Module) -> Tensor:
    return next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))


@contextmanager
def _in_parts(model: nn.Module) -> Iterator[None]:
    """Keep attention and recurrent layers from kernels that are one opaque operation."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    before = [(backend, backend.set_flags(False)[0]) for backend in (_BACKENDS if recurrent else ())]
    try:
        with slow_attention(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for backend, enabled in before:
            backend.set_flags(enabled)
