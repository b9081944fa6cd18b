"""Following channels through a model: which entries of which weights live or die together.

The model is run once on an example, and every operation that reaches PyTorch's dispatcher is seen with its real
tensors, so any control flow in Python is simply followed. Beside each tensor goes a tensor of atoms (`atoms.py`):

* data movement (views, permutations, concatenation, windows of a shifted transformer, …) is done to the atoms as well;
* element-wise operations join the atoms of entries that meet: residual sums, gates, biases, norms' affine parameters;
* a convolution or a matrix product reads channels and gives new ones. Its reader's side joins the atoms it reads, and
  a grouped convolution joins what a group reads with what it gives;
* a product of two activations (attention) joins all that it sums over, so that a head is one atom;
* whatever mixes channels without a weight that could be masked (layer norm, a mean over channels), fixes a shape, or
  isn't known here, locks the channels it touches, and the reason names the operation and the line of the model.

So nothing is known here of any architecture, and nothing that isn't understood is ever pruned.
"""

import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harp.channels.atoms import Atoms
from harp.errors import ModelError

aten = torch.ops.aten

_MOVES = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.slice,
    aten.select, aten.squeeze, aten.unsqueeze, aten.split, aten.split_with_sizes, aten.unbind, aten.cat, aten.stack,
    aten.flip, aten.roll, aten.repeat, aten.index_select, aten.index, aten.constant_pad_nd, aten.pixel_shuffle,
    aten.pixel_unshuffle, aten.channel_shuffle, aten.native_channel_shuffle, aten.unfold, aten.im2col,
    aten._reshape_alias, aten.view_as_real, aten.diagonal, aten.reflection_pad2d, aten.replication_pad2d,
    aten.movedim, aten.swapaxes, aten.narrow, aten._reshape_copy, aten.tile, aten.rot90, aten.slice_copy,
}  # fmt: skip
_SAME = {aten._to_copy, aten.detach, aten.alias, aten.contiguous, aten.lift_fresh, aten.clone}
_POINTWISE = {aten.hardswish, aten.hardswish_, aten._prelu_kernel, aten.prelu, aten.native_dropout, aten.rrelu_with_noise}
_CREATES = {
    aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.empty_like, aten.new_empty_strided, aten.sym_size, aten.is_same_size,
}  # fmt: skip
_REDUCTIONS = {
    aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.max, aten.min, aten.linalg_vector_norm,
    aten.logsumexp, aten.norm, aten.var_mean, aten.std_mean,
}  # fmt: skip
_BATCH_NORMS = {
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training,
    aten.cudnn_batch_norm, aten._batch_norm_no_update, aten._batch_norm_with_update, aten.miopen_batch_norm,
    aten.batch_norm,
}  # fmt: skip
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_attention_math, aten.scaled_dot_product_attention, aten._fused_sdp_choice,
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One axis of a parameter or buffer: the atom of each of its indices."""

    name: str
    axis: int
    atoms: Tensor
    reads: bool = False  # a mixing layer's input side: where masks act


@dataclass(frozen=True)
class Use:
    """One application of a weight to one image: what it reads and what it gives, and how often."""

    name: str
    positions: int
    kernel: int  # weights for each pair of a channel read and one given
    reads: Tensor | None  # None: grouped, every output reads a fixed number
    gives: Tensor
    fixed: int = 1  # channels that each output of a grouped convolution reads


@dataclass(frozen=True)
class Trace:
    """What one run has shown."""

    atoms: Atoms
    sites: list[Site]
    uses: list[Use]


@torch.no_grad()
def trace(model: nn.Module, example: Tensor) -> Trace:
    """Run the model in eval mode on an example and follow its channels. The model is left as it was."""
    flags = [(module, module.training) for module in model.modules()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fast = torch.backends.mha.get_fastpath_enabled()
    watch = _Watch(model, example)
    try:
        for module, _ in flags:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)  # one opaque operation otherwise
        with watch:
            answer = model(example)
    except ModelError:
        raise
    except Exception as error:  # forward may do anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the model can't run on an example of shape {tuple(example.shape)}: {first}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, flag in flags:
            module.training = flag
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return watch.finish(answer)


class _Watch(TorchDispatchMode):
    """The atoms beside every tensor of a run.

    A record is a list of label tensors of the tensor's shape: one for activations, one for each axis of a weight.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.atoms = Atoms()
        self.batch = len(example)
        self.named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.named.setdefault(id(tensor), (name, tensor))
        self.records: dict[int, tuple[Tensor, list[Tensor]]] = {}  # tensors are held, so that ids stay theirs
        self.origin: dict[int, str] = {}  # what a record of several axes is a view of
        self.axes: dict[tuple[str, int], Tensor] = {}
        self.reads: set[tuple[str, int]] = set()
        self.uses: list[Use] = []
        channels = self.atoms.fresh(example.shape[1])
        self.atoms.lock(channels, "the model's input")
        self.give(example, _along(channels, 1, example.shape))

    def finish(self, answer: Any) -> Trace:
        """What was found, after locking what the model answers."""
        for leaf in tree_leaves(answer):
            if isinstance(leaf, Tensor) and (record := self.record(leaf)):
                self.atoms.lock(record[0], "the model's output")
        sites = [Site(name, axis, atoms, (name, axis) in self.reads) for (name, axis), atoms in self.axes.items()]
        return Trace(self.atoms, sites, self.uses)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.record(tensor) is not None for tensor in inputs):
            self.rule(func)(func, args, kwargs, inputs, result)
        return result

    # -- records ------------------------------------------------------------------------------------------------------

    def record(self, tensor: Tensor) -> list[Tensor] | None:
        """The labels of a tensor that depends on the input or is a weight; None for constants."""
        if id(tensor) in self.records:
            return self.records[id(tensor)][1]
        if id(tensor) in self.named and tensor.is_floating_point() and tensor.ndim:
            name = self.named[id(tensor)][0]
            wide = [axis for axis in range(tensor.ndim) if tensor.shape[axis] > 1] or [0]
            labels = [_along(self.axis(name, tensor, axis), axis, tensor.shape) for axis in wide]
            self.records[id(tensor)] = (tensor, labels)
            self.origin[id(tensor)] = name
            return labels
        return None

    def axis(self, name: str, tensor: Tensor, axis: int) -> Tensor:
        """The atoms of a weight's axis."""
        if (name, axis) not in self.axes:
            self.axes[name, axis] = self.atoms.fresh(tensor.shape[axis])
        return self.axes[name, axis]

    def give(self, tensor: Tensor, labels: Tensor | None) -> None:
        """Set an activation's labels; None: it depends on the input but has no channels."""
        if labels is None:
            labels = torch.zeros((), dtype=torch.long).expand(tensor.shape)
        self.records[id(tensor)] = (tensor, [_tidy(labels)])
        self.origin.pop(id(tensor), None)

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight with more than one axis, or a view of one."""
        return len(self.record(tensor) or []) > 1

    def lock(self, tensors: Iterable[Tensor], reason: str) -> None:
        """Lock all that these tensors hold."""
        for tensor in tensors:
            for labels in self.record(tensor) or []:
                self.atoms.lock(_core(labels), reason)

    def channels(self, tensor: Tensor, axis: int, what: str) -> Tensor:
        """The atom of each index along an axis; entries of one index share their fate."""
        record = self.record(tensor)
        if record is None or len(record) > 1:
            return torch.zeros(tensor.shape[axis], dtype=torch.long)
        labels = _core(record[0], keep=axis).movedim(axis, 0).reshape(tensor.shape[axis], -1)
        first = labels[:, 0].contiguous()
        if labels.shape[1] > 1:
            self.atoms.join(labels, first[:, None].expand_as(labels))
            torn = (labels == 0).any(dim=1)
            if bool(torn.any()):
                self.atoms.lock(labels[torn], f"{what} reads it together with what is no channel")
                first = torch.where(torn, 0, first)
        return first

    # -- rules --------------------------------------------------------------------------------------------------------

    def rule(self, func: Any) -> Callable[..., None]:
        """How an operation acts on channels."""
        packet = func._overloadpacket
        if packet in (aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero):
            return self.refuse
        if packet in _CREATES:
            return _nothing
        if packet in _SAME:
            return self.same
        if packet is aten.copy_:
            return self.copy
        if packet in _MOVES:
            return self.move
        if packet is aten.convolution:
            return self.convolution
        if packet in (aten.mm, aten.addmm):
            return self.matrix_product
        if packet in (aten.bmm, aten.baddbmm):
            return self.batched_product
        if packet in _ATTENTION:
            return self.attention
        if packet in _BATCH_NORMS:
            return self.batch_norm
        if packet is aten._softmax or packet is aten._log_softmax:
            return self.softmax
        if packet in _REDUCTIONS:
            return self.reduction
        if "pool" in packet.__name__ or "upsample" in packet.__name__:
            return self.window
        if packet in _POINTWISE or torch.Tag.pointwise in func.tags:
            return self.pointwise
        return self.unknown

    def refuse(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """The model asks for a value and may go another way the next time."""
        if all(id(tensor) in self.origin for tensor in inputs if self.record(tensor)):
            return  # of its own weights only: the same at every call
        raise ModelError(f"forward decides by the values it computes ({_where(func)}): channels can't be followed")

    def unknown(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Lock what an operation touches that isn't understood."""
        self.lock(inputs, f"{_where(func)} mixes channels")
        for tensor in _tensors(result):
            self.give(tensor, None)

    def same(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """A copy."""
        labels = self.record(args[0])
        assert labels is not None
        self.records[id(result)] = (result, labels)
        if id(args[0]) in self.origin:
            self.origin[id(result)] = self.origin[id(args[0])]

    def copy(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Writing into a tensor: what is written into a part of another can't be followed."""
        target, source = args[:2]
        if target._is_view() or self.is_weight(source):
            self.lock(inputs, f"{_where(func)} writes into a part of a tensor")
            if target._base is not None and self.record(target._base) is None:
                self.give(target._base, None)
        record = self.record(source)
        self.give(target, None if record is None or len(record) > 1 else record[0].expand(target.shape))

    def move(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Do to the labels what is done to the tensors."""
        records = {id(tensor): self.record(tensor) for tensor in inputs if tensor.is_floating_point()}
        several = max(len(record or []) for record in records.values())
        if several > 1 and len(records) > 1:
            return self.unknown(func, args, kwargs, inputs, result)
        if func._overloadpacket in (aten.view, aten._unsafe_view):
            func = aten.reshape.default  # labels have other strides
        moved: list[Any] = []
        for number in range(several):
            plain = tree_map(lambda leaf, n=number: _label_of(leaf, records, n), (args, kwargs))
            try:
                moved.append(func(*plain[0], **plain[1]))
            except RuntimeError:  # some kernels know no integers
                doubles = tree_map(_as_double, plain)
                moved.append(tree_map(lambda leaf: leaf.long(), func(*doubles[0], **doubles[1])))
        for tensor, *labels in zip(_tensors(result), *map(_tensors, moved), strict=True):
            self.records[id(tensor)] = (tensor, [_tidy(each) for each in labels])
            if several > 1 or all(id(each) in self.origin for each in inputs if id(each) in records):
                self.origin[id(tensor)] = next(self.origin[id(each)] for each in inputs if id(each) in self.origin)
        return None

    def pointwise(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Join what meets."""
        outputs = _tensors(result)
        shape = outputs[0].shape
        labels = torch.zeros((), dtype=torch.long).expand(shape)
        simple = [tensor for tensor in inputs if tensor.is_floating_point() and not self.is_weight(tensor)]
        for tensor in simple:
            if record := self.record(tensor):
                labels = self.meet(labels, record[0].expand(shape))
        for tensor in inputs:
            if self.is_weight(tensor) and not self.align(labels, tensor):
                self.lock([tensor], f"{_where(func)} computes with a weight")
                self.atoms.lock(_core(labels), f"{_where(func)} joins it with a weight of several axes")
        self.check_partners(labels, simple, _where(func))
        if func._schema.name.endswith("_") and outputs[0]._is_view() and not self.record(outputs[0]):
            self.atoms.lock(_core(labels), f"{_where(func)} writes into a part of a tensor")
        constant = all(id(tensor) in self.origin for tensor in inputs if self.record(tensor))
        for output in outputs:
            self.give(output, labels if output.shape == shape else None)
            if constant:
                self.origin[id(output)] = "computed"

    def meet(self, left: Tensor, right: Tensor) -> Tensor:
        """Join two tensors of labels, entry by entry, and give what is there of either."""
        constant = [axis for axis in range(left.ndim) if _still(left, axis) and _still(right, axis)]
        one, other = (_first(labels, constant) for labels in (left, right))
        self.atoms.join(one, other)
        return torch.where(one > 0, one, other).expand(left.shape)

    def align(self, labels: Tensor, weight: Tensor) -> bool:
        """Join labels with the one axis of a weight that goes along with them, if there is one."""
        here = self.atoms.find(_core(labels))
        if not bool((here > 0).any()):
            return False
        for axis in self.record(weight) or []:
            full, there = torch.broadcast_tensors(labels, axis)
            constant = [d for d in range(full.ndim) if _still(full, d) and _still(there, d)]
            one, other = (self.atoms.find(_first(each, constant)).reshape(-1) for each in (full, there))
            pairs = len(torch.unique(torch.stack([one, other]), dim=1).T)
            if pairs == len(torch.unique(one)) == len(torch.unique(other)):
                self.atoms.join(one, other)
                return True
        return False

    def check_partners(self, labels: Tensor, tensors: Sequence[Tensor], where: str) -> None:
        """Lock channels that meet, index by index, something that has none and so would not shrink with them."""
        varying = [axis for axis in range(labels.ndim) if not _still(labels, axis)]
        for tensor in tensors:
            offset = labels.ndim - tensor.ndim
            wide = any(axis >= offset and tensor.shape[axis - offset] > 1 for axis in varying)
            record = self.record(tensor)
            own = record[0].expand(labels.shape) if record else torch.zeros((), dtype=torch.long).expand(labels.shape)
            if wide:
                constant = [axis for axis in range(labels.ndim) if _still(labels, axis) and _still(own, axis)]
                mine, theirs = _first(own, constant), _first(labels, constant)
                lost = (mine == 0) & (theirs > 0)
                if bool(lost.any()):
                    self.atoms.lock(theirs[lost], f"{where} joins it with what is no channel")

    def convolution(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Read channels, give new ones; the groups of a grouped convolution live or die whole."""
        x, weight, bias, _, _, _, transposed, _, groups = args[:9]
        if id(weight) not in self.named:
            return self.unknown(func, args, kwargs, inputs, result)
        name = self.named[id(weight)][0]
        read = self.channels(x, 1, _where(func))
        kernel = math.prod(weight.shape[2:])
        positions = (x if transposed else result)[0, 0].numel()
        if groups == 1:
            side, other = (0, 1) if transposed else (1, 0)
            reads, gives = self.axis(name, weight, side), self.axis(name, weight, other)
            self.bind(reads, read, (name, side), _where(func))
            self.uses.append(Use(name, positions, kernel, reads, gives))
        else:
            gives = self.grouped(weight, name, read, groups, transposed)
            fixed = weight.shape[0 if transposed else 1] // (groups if transposed else 1)
            self.uses.append(Use(name, positions, kernel, None, gives, fixed))
        if bias is not None:
            self.attach(bias, gives)
        self.give(result, _along(gives, 1, result.shape))
        return None

    def grouped(self, weight: Tensor, name: str, read: Tensor, groups: int, transposed: bool) -> Tensor:
        """Join what each group reads and gives; the atoms of what it gives."""
        if transposed:  # its outputs have no axis of their own that spans all groups
            self.atoms.lock(read, f"{name} is a grouped transposed convolution")
            return torch.zeros(weight.shape[1] * groups, dtype=torch.long)
        gives = self.axis(name, weight, 0)
        for inside, outside in zip(read.chunk(groups), gives.chunk(groups), strict=True):
            if bool((inside == 0).any()):
                self.atoms.lock(outside, f"{name} reads what is no channel")
            self.atoms.join_all(torch.cat([inside, outside]))
        return gives

    def bind(self, reads: Tensor, read: Tensor, site: tuple[str, int], where: str) -> None:
        """Let a reader's side follow the channels that it reads."""
        self.atoms.join(reads, read)
        self.atoms.lock(reads[read == 0], f"{where} reads what is no channel")
        self.reads.add(site)

    def attach(self, tensor: Tensor, channels: Tensor) -> None:
        """Let a vector (bias, scale, statistic) follow the channels."""
        record = self.record(tensor)
        if record and len(record) == 1 and tensor.shape == channels.shape:
            self.atoms.join(record[0], channels)
            self.atoms.lock(record[0][channels == 0], "belongs to what is no channel")
        else:
            self.atoms.lock(channels, "a bias or scale that is computed")

    def matrix_product(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """A linear layer: rows of features times a weight."""
        *bias, left, right = args[-3:] if func._overloadpacket is aten.addmm else args
        if not self.is_weight(right) and self.is_weight(left):  # weight times features in columns
            found = self.linear(right, 0, left, 1, func)
            self.give(result, None if found is None else _along(found, 0, result.shape))
        elif self.is_weight(right) and not self.is_weight(left):
            found = self.linear(left, 1, right, 0, func)
            self.give(result, None if found is None else _along(found, 1, result.shape))
        else:
            return self.unknown(func, args, kwargs, inputs, result)
        if bias and found is not None:
            self.attach(bias[0], found)
        return None

    def linear(self, x: Tensor, features: int, weight: Tensor, side: int, func: Any) -> Tensor | None:
        """Let a matrix read features and give new ones: their atoms, None if it can't be followed."""
        axes = self.record(weight) or []
        reads = next((a.select(1 - side, 0) for a in axes if _still(a, 1 - side) and not _still(a, side)), None)
        gives = next((a.select(side, 0) for a in axes if _still(a, side) and not _still(a, 1 - side)), None)
        name = self.origin.get(id(weight), "computed")
        if reads is None or gives is None or name == "computed":
            self.lock([x, weight], f"{_where(func)} multiplies by a weight that is computed")
            return None
        read = self.channels(x, features, _where(func))
        site = next((n, a) for (n, a), atoms in self.axes.items() if n == name and bool(torch.isin(reads[:1], atoms)))
        self.bind(reads, read, site, _where(func))
        self.uses.append(Use(name, x.shape[1 - features] // self.batch, 1, reads, gives))
        return gives

    def batched_product(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """A product of activations: what is summed over lives or dies together."""
        left, right = args[-2:]
        if func._overloadpacket is aten.baddbmm or self.is_weight(left) or self.is_weight(right):
            return self.unknown(func, args, kwargs, inputs, result)
        ours, theirs = ((self.record(t) or [_none(t)])[0] for t in (left, right))
        one, other = self.summed(ours, 2), self.summed(theirs, 1)
        if not (_still(ours, 2) and _still(theirs, 1)):  # per matrix of the batch, one atom for all that is summed
            whole = torch.cat([_first(ours, [1]).flatten(1), _first(theirs, [2]).flatten(1)], dim=1)
            for labels in torch.unique(whole, dim=0) if _still(ours, 1) and _still(theirs, 2) else [whole.flatten()]:
                self.atoms.join_all(labels)
        self.give(result, self.meet(one.expand(result.shape), other.expand(result.shape)))
        return None

    def summed(self, labels: Tensor, axis: int) -> Tensor:
        """The first labels along an axis."""
        return labels.narrow(axis, 0, 1)

    def attention(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Scaled dot product attention: a head lives or dies whole."""
        heads = [(self.record(t) or [_none(t)])[0] for t in args[:3]]
        query, _, value = args[:3]
        if query.ndim != 4 or len({t.shape[1] for t in args[:3]}) > 1 or not all(_still(h, 2) for h in heads):
            return self.unknown(func, args, kwargs, inputs, result)
        for number in range(query.shape[1]):
            self.atoms.join_all(torch.cat([_core(each[:, number]).reshape(-1) for each in heads]))
        first, *others = _tensors(result)
        self.give(first, heads[2][:, :, :1].expand(*value.shape[:2], query.shape[2], value.shape[3]))
        for other in others:
            self.give(other, None)
        mask = next((t for t in inputs[3:] if self.record(t)), None)
        if mask is not None:
            scores = _along(heads[2][0, :, 0, 0].contiguous(), 1, (*query.shape[:3], args[1].shape[2]))
            if not self.is_weight(mask):
                self.meet(scores, (self.record(mask) or [])[0].expand(scores.shape))
            elif not self.align(scores, mask):
                self.lock([value, mask], f"{_where(func)} adds a computed bias")
        return None

    def batch_norm(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Scale and shift per channel."""
        x, *vectors = args[:5]
        channels = self.channels(x, 1, _where(func))
        for vector in vectors:
            if isinstance(vector, Tensor):
                self.attach(vector, channels)
        first, *others = _tensors(result)
        self.give(first, _along(channels, 1, first.shape))
        for other in others:
            self.give(other, None)

    def softmax(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Normalise along an axis that must not be the channels'."""
        labels = (self.record(args[0]) or [_none(args[0])])[0]
        if not _still(labels, args[1] % labels.ndim):
            return self.unknown(func, args, kwargs, inputs, result)
        self.give(result, labels)
        return None

    def reduction(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Sum or choose along axes that must not be the channels'."""
        x = args[0]
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        wanted = given.get("dim")
        axes = list(range(x.ndim)) if wanted is None or wanted == [] else wanted
        axes = [axis % x.ndim for axis in ([axes] if isinstance(axes, int) else axes)]
        record = self.record(x) or []
        if len(record) != 1 or len(inputs) > 1 or not all(_still(record[0], axis) for axis in axes):
            return self.unknown(func, args, kwargs, inputs, result)
        labels = _first(record[0], axes)
        for output in _tensors(result):
            same = output.numel() == labels.numel()
            self.give(output, labels.reshape(output.shape) if same else None)
        return None

    def window(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Pool or resize every channel on its own."""
        x = args[0]
        axis = 0 if x.ndim == 2 or ("2d" in func._schema.name and x.ndim == 3) else 1
        first, *others = _tensors(result)
        if first.ndim != x.ndim or first.shape[axis] != x.shape[axis]:
            return self.unknown(func, args, kwargs, inputs, result)
        self.give(first, _along(self.channels(x, axis, _where(func)), axis, first.shape))
        for other in others:
            self.give(other, None)
        return None


# -- label tensors ----------------------------------------------------------------------------------------------------
# They are kept with stride 0 along every axis on which nothing changes, so that most work is on a few numbers.


def _along(ids: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """Labels that vary along one axis."""
    return ids.reshape([-1 if a == axis else 1 for a in range(len(shape))]).expand(*shape)


def _none(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.long).expand(tensor.shape)


def _still(labels: Tensor, axis: int) -> bool:
    return labels.shape[axis] <= 1 or labels.stride(axis) == 0


def _first(labels: Tensor, axes: Iterable[int]) -> Tensor:
    """The first entry along some axes, which stay as axes of length one."""
    for axis in axes:
        labels = labels.narrow(axis, 0, min(1, labels.shape[axis]))
    return labels


def _core(labels: Tensor, keep: int | None = None) -> Tensor:
    """Labels without the axes on which nothing changes (of length one then), but for one to keep."""
    return _first(labels, [axis for axis in range(labels.ndim) if axis != keep and _still(labels, axis)])


def _tidy(labels: Tensor) -> Tensor:
    """The same labels with stride 0 wherever nothing changes."""
    small = _core(labels)
    for axis in range(small.ndim):
        if small.shape[axis] > 1 and bool((small == small.narrow(axis, 0, 1)).all()):
            small = small.narrow(axis, 0, 1)
    return small.expand(labels.shape)


def _label_of(leaf: Any, records: dict[int, list[Tensor] | None], number: int) -> Any:
    if not isinstance(leaf, Tensor):
        return 0 if isinstance(leaf, float) else leaf  # the value that padding fills in
    if id(leaf) not in records:
        return leaf.cpu()  # an index
    record = records[id(leaf)]
    return _none(leaf) if record is None else record[number]


def _as_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.long else leaf


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _nothing(*_: Any) -> None:
    """An operation that asks for a shape only."""


def _where(func: Any) -> str:
    """An operation and the line of the model that calls it."""
    inner = [Path(torch.__file__).parent, Path(__file__).parent]
    frames = [f for f in traceback.extract_stack() if not any(Path(f.filename).is_relative_to(i) for i in inner)]
    frame = frames[-1]
    return f"{func._schema.name.removeprefix('aten::')} at {Path(frame.filename).name}:{frame.lineno}"
