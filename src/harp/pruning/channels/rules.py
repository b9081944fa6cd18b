"""How each kind of operation acts on channels: a rule a kind, and a table of them.

A rule sets the labels of an operation's results, joins the atoms that must be removed together, and locks those that
can't be removed. A rule that can't follow an operation raises `NoRule`: then all channels of its tensors are locked.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from harp.errors import ModelError
from harp.pruning.channels.labelled_run import LabelledRun
from harp.pruning.channels.labels import alike, along, core, cores, first, is_constant, tidy, varying
from harp.pruning.channels.traces import Use
from harp.pruning.operations import COPIES, MOVES, REDUCTIONS, Call, aten, tensors_in

Rule = Callable[[LabelledRun, Call], None]

_PLACED = {  # the result depends on the positions of channels
    aten.slice, aten.select, aten.roll, aten.split, aten.split_with_sizes, aten.index, aten.index_select, aten.unbind,
    aten.unfold, aten.diagonal, aten.slice_copy,
}  # fmt: skip
_VIEWS = {aten.view, aten._unsafe_view, aten._reshape_alias, aten._reshape_copy}


class NoRule(Exception):
    """An operation mixes channels, or is not known."""


def follow(run: LabelledRun, call: Call) -> None:
    """Apply the rule of an operation, if one of its tensors depends on the input or is a weight."""
    known = [tensor for tensor in call.inputs if run.is_known(tensor)]
    if not known:
        return
    from_weights = all(id(tensor) in run.origin or id(tensor) not in run.records for tensor in known)
    for argument, value in zip(call.func._schema.arguments, call.args, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        if writes and value._is_view() and not run.is_known(value._base):  # the other parts are not followed
            run.block(known, [value._base], f"{run.where(call)} writes into a part of a tensor")
    try:
        _rule(call)(run, call)
    except NoRule:
        run.block(call.inputs, call.outputs, f"{run.where(call)} mixes channels")
    for tensor in call.outputs if from_weights else ():
        run.origin.setdefault(id(tensor), "computed")


def _rule(call: Call) -> Rule:
    if call.packet in RULES:
        return RULES[call.packet]
    if call.is_random:
        return random
    if "pool" in call.name or "upsample" in call.name:
        return window
    if call.is_pointwise:
        return pointwise
    raise NoRule


def nothing(run: LabelledRun, call: Call) -> None:
    """An operation that uses a tensor's shape only."""


def refuse(run: LabelledRun, call: Call) -> None:
    """The model uses a value that it computes, and may take another branch for another input."""
    if any(id(tensor) in run.records and id(tensor) not in run.origin for tensor in call.inputs):
        raise ModelError(f"forward decides by the values it computes ({run.where(call)}): channels can't be followed")


def same(run: LabelledRun, call: Call) -> None:
    """A copy."""
    run.put(call.result, run.record(call.args[0]), run.origin.get(id(call.args[0])))


def same_shape(run: LabelledRun, call: Call) -> None:
    """A constant whose shape follows that of an activation."""
    if not run.is_weight(call.args[0]):
        run.give(call.result, run.labels(call.args[0]))


def copy_into(run: LabelledRun, call: Call) -> None:
    """Writing into a tensor; writing into a part of one can't be followed."""
    target, source = call.args[:2]
    if target._is_view() or run.is_weight(source):
        run.block(call.inputs, [target], f"{run.where(call)} writes into a part of a tensor")
    else:
        run.give(target, run.labels(source).expand(target.shape))


def move(run: LabelledRun, call: Call) -> None:
    """Do to the labels what is done to the tensors."""
    data, indices = call.inputs, []
    if call.packet in (aten.index, aten.index_select):
        data, indices = call.inputs[:1], call.inputs[1:]
    weights = any(run.is_weight(tensor) for tensor in data) or (len(data) == 1 and run.is_matrix(data[0]))
    if (weights and len(data) > 1) or any(run.is_known(tensor) for tensor in indices):
        raise NoRule
    records = {id(tensor): run.record(tensor) if weights else [run.labels(tensor)] for tensor in data}
    moved = [_moved(call, records, number) for number in range(len(records[id(data[0])]))]
    if len(moved) == data[0].ndim == 2 and _transposes(call):
        moved.reverse()  # the labels of a matrix with one entry don't say which axis they belong to
    origin = None
    if all(id(tensor) in run.origin for tensor in data):
        origin = run.origin[id(data[0])] if len(data) == 1 else "computed"
    for tensor, *record in zip(call.outputs, *moved, strict=True):
        run.put(tensor, [tidy(labels) for labels in record], origin)
    _note_places(run, call, data[0])


def _moved(call: Call, records: dict[int, list[Tensor]], number: int) -> list[Tensor]:
    """The labels of the results."""

    def labels_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return records[id(leaf)][number] if id(leaf) in records else leaf.cpu()  # an index

    args, kwargs = tree_map(labels_of, (call.args, call.kwargs))
    func = aten.reshape.default if call.packet in (aten.view, aten._unsafe_view) else call.func  # for other strides
    try:
        return tensors_in(func(*args, **kwargs))
    except (RuntimeError, TypeError):  # some kernels have no version for integers
        args, kwargs = tree_map(_as_double, (args, kwargs))
    try:
        return [leaf.long() for leaf in tensors_in(func(*args, **kwargs))]
    except (RuntimeError, TypeError):
        raise NoRule from None


def _as_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.long else leaf


def _transposes(call: Call) -> bool:
    """Whether an operation transposes a matrix."""
    if call.packet is aten.permute:
        return bool(call.args[1][0] % 2 == 1)
    return call.packet is aten.t or (call.packet is aten.transpose and call.args[1] % 2 != call.args[2] % 2)


def _note_places(run: LabelledRun, call: Call, source: Tensor) -> None:
    """Note which channels are distinguished by their positions, and what is split into equal parts."""
    record = run.record(source)
    results = zip(record, run.record(call.outputs[0]), strict=True)
    splits_axis = call.packet in _VIEWS and any(len(varying(new)) > len(varying(old)) for old, new in results)
    if call.packet not in _PLACED and not splits_axis:
        return
    for labels in record:
        if varying(labels) and bool((core(labels) > 0).any()):
            run.placed.append((core(labels).reshape(-1), run.where(call)))
        if call.packet is aten.split and not is_constant(labels, axis := call.argument("dim", 0) % labels.ndim):
            parts = torch.split(core(labels), call.args[1], axis)
            run.pieces.append(([part.reshape(-1) for part in parts], run.where(call)))


def pad(run: LabelledRun, call: Call) -> None:
    """Padding: more positions of the same channels, or constants among the channels."""
    labels, sides = _activation(run, call.args[0]), list(call.args[1])
    for axis in range(labels.ndim):
        number = 2 * (labels.ndim - 1 - axis)
        if number < len(sides) and is_constant(labels, axis):
            shape = list(labels.shape)
            shape[axis] = call.result.shape[axis]
            labels = labels.narrow(axis, 0, 1).expand(shape)
            sides[number : number + 2] = [0, 0]
    run.give(call.result, call.func(labels, sides, 0) if any(sides) else labels)


def patches(run: LabelledRun, call: Call) -> None:
    """Patches side by side: every channel as often as a patch has positions."""
    labels = _activation(run, call.args[0])
    if any(axis != 1 for axis in varying(labels)):
        raise NoRule
    ids = labels[0, :, 0, 0].repeat_interleave(math.prod(call.args[1]))
    run.give(call.result, along(ids, 1, call.result.shape))


def random(run: LabelledRun, call: Call) -> None:
    """Random numbers of the shape of an activation."""
    if any(tensor.shape != call.inputs[0].shape for tensor in [*call.inputs, *call.outputs]):
        raise NoRule
    pointwise(run, call)


def gate(run: LabelledRun, call: Call) -> None:
    """One half of the channels times a function of the other."""
    halves = _activation(run, call.args[0]).chunk(2, call.argument("dim", -1))
    one, other = cores(*halves)
    run.unite(one, other, run.where(call))
    run.unite(other, one, run.where(call))
    run.give(call.result, _meet(run, *halves))


def pointwise(run: LabelledRun, call: Call) -> None:
    """Join the channels of all operands, entry by entry."""
    activations = [tensor for tensor in call.inputs if not run.is_weight(tensor)]
    labels = _joined(run, activations, call.outputs[0].shape, call)
    for tensor in call.inputs:
        if run.is_weight(tensor) and not _align(run, labels, tensor):
            run.lock([tensor], f"{run.where(call)} computes with a weight")
            run.atoms.lock(core(labels), f"{run.where(call)} joins it with a weight of several axes")
    for output in call.outputs:
        run.give(output, labels)


def _activation(run: LabelledRun, tensor: Tensor) -> Tensor:
    """The labels of a tensor that must not be a weight."""
    if run.is_weight(tensor):
        raise NoRule
    return run.labels(tensor)


def _joined(run: LabelledRun, tensors: Iterable[Tensor], shape: torch.Size, call: Call) -> Tensor:
    """Join the labels of tensors that are broadcast to a shape, entry by entry; the joined labels."""
    operands = [(tensor, run.labels(tensor).expand(shape)) for tensor in tensors]
    labels = alike(0, shape)
    wide = {axis for _, own in operands for axis in varying(own)}
    for tensor, own in operands:
        if varying(own) or not any(_is_broadcast(tensor, axis, own.ndim) for axis in wide):
            labels = _meet(run, labels, own)
        else:  # one number for many channels: it can't be removed, and nothing else depends on it
            run.atoms.lock(core(own), f"{run.where(call)} spreads it over many channels")
    for tensor, own in operands:
        if any(not _is_broadcast(tensor, axis, own.ndim) for axis in varying(labels)):
            ours, mine = cores(labels, own)
            run.lock_beside(ours, mine, run.where(call))
    return labels


def _meet(run: LabelledRun, left: Tensor, right: Tensor) -> Tensor:
    """Join two tensors of labels, entry by entry; the labels of the left one, or the right one's where it has none."""
    one, other = cores(left, right)
    run.atoms.join(one, other)
    return torch.where((one > 0) | (other == 0), one, other).expand(left.shape)


def _align(run: LabelledRun, labels: Tensor, weight: Tensor) -> bool:
    """Join labels with the one axis of a weight that varies with them, if there is one."""
    if not bool((core(labels) > 0).any()):
        return False
    if all(_is_broadcast(weight, axis, labels.ndim) for axis in varying(labels)):
        return True  # it has the same value for all channels
    for axis in run.record(weight):
        pair = cores(labels, axis.expand(labels.shape))
        one, other = (run.atoms.find(part).reshape(-1) for part in pair)
        pairs = set(zip(one.tolist(), other.tolist(), strict=True))
        if varying(axis) and len(pairs) == len(torch.unique(one)):  # every channel meets one index
            run.atoms.join(one, other)
            run.atoms.lock(other[one <= 0], "belongs to entries without channels")
            return True
    return False


def _is_broadcast(tensor: Tensor, axis: int, ndim: int) -> bool:
    """Whether a tensor has one entry only along an axis of the shape it is broadcast to."""
    own = axis - (ndim - tensor.ndim)
    return own < 0 or tensor.shape[own] == 1


def convolution(run: LabelledRun, call: Call) -> None:
    """Read channels and write new ones; the groups of a grouped convolution are removed as a whole."""
    x, weight, bias, _, _, _, transposed, _, groups = call.args[:9]
    where = run.where(call)
    kernel = math.prod(weight.shape[2:])
    counted = x if transposed else call.result
    positions = counted.numel() // counted.shape[1]
    if id(weight) not in run.named:
        outputs = torch.zeros(call.result.shape[1], dtype=torch.long)
        run.computed.append(Use("", positions, kernel, x.shape[1] // groups, outputs))
        return run.block(call.inputs, [call.result], f"{where} has a weight that is computed")
    name = run.named[id(weight)][0]
    read = run.channels(x, 1, where)
    if groups == 1:
        side, other = (0, 1) if transposed else (1, 0)
        reads, gives = run.axis(name, weight, side), run.axis(name, weight, other)
        _bind(run, reads, read, (name, side), where)
        run.uses.append(Use(name, positions, kernel, reads, gives))
    else:
        gives = _grouped(run, weight, name, read, groups, transposed, where)
        run.uses.append(Use(name, positions, kernel, x.shape[1] // groups, gives))
    if bias is not None:
        _attach(run, bias, gives)
    return run.give(call.result, along(gives, 1, call.result.shape))


def _grouped(
    run: LabelledRun, weight: Tensor, name: str, read: Tensor, groups: int, transposed: bool, where: str
) -> Tensor:
    """Join the channels that each group reads and writes; the labels of those that it writes."""
    if transposed:  # its outputs have no axis of their own that spans all groups
        reason = f"{where} is a grouped transposed convolution"
        run.atoms.lock(read, reason)
        return torch.full((weight.shape[1] * groups,), run.void([], reason))
    gives = run.axis(name, weight, 0)
    run.join_rows(torch.cat([gives.reshape(groups, -1), read.reshape(groups, -1)], dim=1), where)
    return gives


def _bind(run: LabelledRun, reads: Tensor, read: Tensor, site: tuple[str, int], where: str) -> None:
    """Join the input axis of a weight with the channels that it reads."""
    run.unite(reads, read, where)
    if site[0] not in run.parameters:
        run.atoms.lock(reads, f"{where} reads it with a buffer, which has no mask")
    run.reads.add(site)


def _attach(run: LabelledRun, tensor: Tensor, channels: Tensor) -> None:
    """Join a vector (bias, scale, statistic) with the channels that it belongs to."""
    is_vector = run.record(tensor) and not run.is_weight(tensor) and tensor.shape == channels.shape
    if is_vector and id(tensor) in run.origin:
        vector = run.labels(tensor)
        run.unite(channels, vector, "a bias or scale")
        run.atoms.lock(vector[channels <= 0], "belongs to entries without channels")
    else:
        run.atoms.lock(channels, "its bias or scale is computed")


def matrix_product(run: LabelledRun, call: Call) -> None:
    """A linear layer: rows of features times a weight, or a weight times features in columns."""
    *bias, left, right = call.args
    axis, gives = 0, None
    if run.is_matrix(right) and not run.is_matrix(left):
        axis, gives = 1, _linear(run, left, 1, right, 0, call)
    elif run.is_matrix(left) and not run.is_matrix(right):
        gives = _linear(run, right, 0, left, 1, call)
    if gives is None and (id(left) in run.origin or id(right) in run.origin):  # a weight that is computed
        outputs = torch.zeros(call.result.shape[1], dtype=torch.long)
        run.computed.append(Use("", call.result.shape[0], 1, left.shape[1], outputs))
    if gives is None or (bias and axis == 0):
        raise NoRule
    if bias:
        _attach(run, bias[0], gives)
    run.give(call.result, along(gives, axis, call.result.shape))


def _linear(run: LabelledRun, x: Tensor, features: int, weight: Tensor, side: int, call: Call) -> Tensor | None:
    """Let one side of a matrix read features; the atoms of the features that it writes, None if it is reshaped."""
    reads, gives = _axis_of(run.record(weight), side), _axis_of(run.record(weight), 1 - side)
    name = run.origin.get(id(weight), "computed")
    if reads is None or gives is None or reads is gives or name == "computed":
        return None
    read_ids, given_ids = reads.select(1 - side, 0).contiguous(), gives.select(side, 0).contiguous()
    site = next((n, a) for (n, a), ids in run.axes.items() if n == name and bool(torch.isin(read_ids[:1], ids)))
    _bind(run, read_ids, run.channels(x, features, run.where(call)), site, run.where(call))
    run.uses.append(Use(name, x.shape[1 - features], 1, read_ids, given_ids))
    return given_ids


def _axis_of(record: list[Tensor], side: int) -> Tensor | None:
    """The labels of a matrix's rows (0) or columns (1)."""
    if record[0].numel() == 1:
        return record[side]
    candidates = [labels for labels in record if varying(labels) == [side]]
    if not candidates and record[0].shape[side] == 1:
        candidates = [labels for labels in record if not varying(labels)]
    return candidates[0] if len(candidates) == 1 else None


def batched_product(run: LabelledRun, call: Call) -> None:
    """A product of activations: all that is summed over is removed together."""
    left, right = call.args[-2:]
    if any(run.is_weight(tensor) for tensor in call.inputs):
        if call.packet is not aten.bmm or len(left) > 1:
            raise NoRule
        pages = [_page(run, left), _page(run, right)]  # a matrix product after all
        result = call.result[0]
        matrix_product(run, Call(call.func, pages, {}, result))
        return run.give(call.result, run.labels(result)[None])
    # entry (b, i, k) of one is multiplied by entry (b, k, j) of the other
    shape = (*left.shape, right.shape[2])
    ours, theirs = run.labels(left)[:, :, :, None].expand(shape), run.labels(right)[:, None].expand(shape)
    labels = _meet(run, ours, theirs)
    for own, broadcast in ((ours, 3), (theirs, 1)):
        if any(axis != broadcast for axis in varying(labels)):
            here, mine = cores(labels, own)
            run.lock_beside(here, mine, run.where(call))
    if not is_constant(labels, 2):
        small = core(labels)
        run.atoms.join(small, small.narrow(2, 0, 1).expand_as(small))
    if varying(labels) == [2]:  # no channel is left that could be removed
        run.atoms.lock(core(labels), f"{run.where(call)} sums over all of it")
        run.void([call.result], f"{run.where(call)} sums over all channels")
    else:
        run.give(call.result, labels[:, :, 0])
    if call.packet is aten.baddbmm:
        run.give(call.result, _joined(run, [call.result, call.args[0]], call.result.shape, call))
    return None


def _page(run: LabelledRun, tensor: Tensor) -> Tensor:
    """The one matrix of a batch of one."""
    page = tensor[0]
    if run.record(tensor):
        run.put(page, [labels[0] for labels in run.record(tensor)], run.origin.get(id(tensor)))
    return page


def attention(run: LabelledRun, call: Call) -> None:
    """Scaled dot product attention: a head is removed as a whole."""
    query, key, value = call.args[:3]
    heads = [_activation(run, tensor) for tensor in (query, key, value)]
    known_layout = query.ndim == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    if not known_layout or not all(is_constant(labels, 2) for labels in heads):
        raise NoRule
    where = run.where(call)
    if query.shape[1] == 1:  # with one head only the values can be removed
        run.lock([query, key], f"{where} sums over all of it")
    else:
        for number in range(query.shape[1]):
            head = torch.cat([core(labels[:, number]).reshape(-1) for labels in heads])
            run.join_rows(head[None], where)
    answer, *others = call.outputs
    run.give(answer, heads[2][:, :, :1].expand(*value.shape[:2], query.shape[2], value.shape[3]))
    run.void(others, f"{where} mixes channels")
    scores = heads[2][:, :, :1, :1].expand(*query.shape[:3], key.shape[2])
    for mask in [tensor for tensor in call.inputs[3:] if tensor.ndim]:
        if run.is_weight(mask):
            if not _align(run, scores, mask):
                run.lock([value, mask], f"{where} adds a weight of several axes")
        elif not is_constant(mask.expand(scores.shape), 1):
            ours, own = cores(scores, run.labels(mask).expand(scores.shape))
            run.unite(ours, own, where)


def batch_norm(run: LabelledRun, call: Call) -> None:
    """Scale and shift per channel."""
    x, *vectors = call.args[:5]
    channels = run.channels(x, 1, run.where(call))
    for vector in vectors:
        if isinstance(vector, Tensor):
            _attach(run, vector, channels)
    answer, *others = call.outputs
    run.give(answer, along(channels, 1, answer.shape))
    run.void(others, f"{run.where(call)} gives statistics")


def softmax(run: LabelledRun, call: Call) -> None:
    """Normalise along an axis that must not be the channels'."""
    labels = _activation(run, call.args[0])
    if not is_constant(labels, call.args[1] % labels.ndim):
        raise NoRule
    run.give(call.result, labels)


def reduction(run: LabelledRun, call: Call) -> None:
    """Sum or choose along axes that must not be the channels'."""
    labels, axes = _activation(run, call.args[0]), call.reduced_axes()
    if len(call.inputs) > 1 or not all(is_constant(labels, axis) for axis in axes):
        raise NoRule
    for output in call.outputs:
        run.give(output, first(labels, axes).reshape(output.shape))


def window(run: LabelledRun, call: Call) -> None:
    """Pool or resize every channel on its own."""
    x = call.args[0]
    axis = 0 if x.ndim == 2 or ("2d" in call.name and x.ndim == 3) else 1
    if any(t.ndim != x.ndim or t.shape[axis] != x.shape[axis] for t in [*call.inputs, *call.outputs]):
        raise NoRule
    labels = run.channels(x, axis, run.where(call))
    for other in call.inputs[1:]:  # the indices that an unpooling writes its values to
        run.unite(labels, run.channels(other, axis, run.where(call)), run.where(call))
    for answer in call.outputs:
        run.give(answer, along(labels, axis, answer.shape))


_KINDS: list[tuple[Rule, Iterable[Any]]] = [
    (refuse, [aten._local_scalar_dense, aten.equal, aten.nonzero]),
    (nothing, [aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided,
               aten.is_same_size, aten._fused_sdp_choice]),
    (same, [*COPIES, aten.detach, aten.alias, aten.lift_fresh]),
    (same_shape, [aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like, aten.randn_like]),
    (copy_into, [aten.copy_]),
    (move, MOVES),
    (pad, [aten.constant_pad_nd]),
    (patches, [aten.im2col]),
    (gate, [aten.glu]),
    (convolution, [aten.convolution]),
    (matrix_product, [aten.mm, aten.addmm]),
    (batched_product, [aten.bmm, aten.baddbmm]),
    (attention, [aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
                 aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention]),
    (batch_norm, [aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training,
                  aten.cudnn_batch_norm, aten._batch_norm_no_update, aten._batch_norm_with_update,
                  aten.miopen_batch_norm]),
    (softmax, [aten._softmax, aten._log_softmax, aten._safe_softmax]),
    (reduction, [*REDUCTIONS, aten.norm, aten.var_mean, aten.std_mean]),
]  # fmt: skip
RULES: dict[Any, Rule] = {packet: rule for rule, packets in _KINDS for packet in packets}
