"""How each kind of operation acts on channels: what it joins, reads, gives, or locks."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from harp.errors import ModelError
from harp.pruning.channels.labelled_run import Records
from harp.pruning.channels.labels import alike, along, core, cores, first, still, tidy, varying
from harp.pruning.channels.operations import (
    ATTENTION,
    BATCH_NORMS,
    CREATES,
    DECIDES,
    LIKE,
    MOVES,
    PLACED,
    POINTWISE,
    REDUCTIONS,
    SAME,
    SPLITS,
    aten,
)
from harp.pruning.channels.traces import Use


class Rules(Records):
    """Labels, and what operations do to them."""

    def rule(self, func: Any) -> Callable[..., None]:
        """How an operation acts on channels."""
        packet = func._overloadpacket
        for packets, rule in self.rules():
            if packet in packets:
                return rule
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self.random
        if "pool" in packet.__name__ or "upsample" in packet.__name__:
            return self.window
        return self.pointwise if torch.Tag.pointwise in func.tags else self.unknown

    def rules(self) -> Iterator[tuple[set[Any], Callable[..., None]]]:
        """The operations that are known by name."""
        yield DECIDES, self.refuse
        yield CREATES, _nothing
        yield SAME, self.same
        yield LIKE, self.same_shape
        yield {aten.copy_}, self.copy
        yield MOVES, self.move
        yield {aten.constant_pad_nd}, self.pad
        yield {aten.im2col}, self.patches
        yield {aten.glu}, self.gate
        yield {aten.convolution}, self.convolution
        yield {aten.mm, aten.addmm}, self.matrix_product
        yield {aten.bmm, aten.baddbmm}, self.batched_product
        yield ATTENTION, self.attention
        yield BATCH_NORMS, self.batch_norm
        yield {aten._softmax, aten._log_softmax}, self.softmax
        yield REDUCTIONS, self.reduction
        yield POINTWISE, self.pointwise

    def written(self, func: Any, args: Any, known: list[Tensor]) -> None:
        """Lock what is written into a part of a constant: the rest of it is not seen here."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
            if writes and value._is_view() and value._base is not None and not self.is_known(value._base):
                reason = f"{self.where(func)} writes into a part of a tensor"
                self.lock(known, reason)
                self.void([value._base], reason)

    def refuse(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """The model asks for a value and may go another way the next time."""
        if all(id(tensor) in self.origin for tensor in inputs if id(tensor) in self.records):
            return  # of its own weights only: the same at every call
        raise ModelError(f"forward decides by the values it computes ({self.where(func)}): channels can't be followed")

    def unknown(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Lock what an operation touches that isn't understood."""
        reason = f"{self.where(func)} mixes channels"
        self.lock(inputs, reason)
        self.void(outputs_of(result), reason)

    def same(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """A copy."""
        labels = self.record(args[0])
        assert labels is not None
        self.records[id(result)] = (result, labels)
        if id(args[0]) in self.origin:
            self.origin[id(result)] = self.origin[id(args[0])]

    def same_shape(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """A constant whose shape follows that of an activation."""
        if not self.is_weight(args[0]):
            self.give(result, self.labels(args[0]))

    def copy(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Writing into a tensor: what is written into a part of another can't be followed."""
        target, source = args[:2]
        if target._is_view() or self.is_weight(source):
            reason = f"{self.where(func)} writes into a part of a tensor"
            self.lock(inputs, reason)
            self.void([target], reason)
        else:
            self.give(target, self.labels(source).expand(target.shape))

    def move(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Do to the labels what is done to the tensors."""
        data, indices = inputs, []
        if func._overloadpacket in (aten.index, aten.index_select):
            data, indices = inputs[:1], inputs[1:]
        weights = any(self.is_weight(tensor) for tensor in data) or (len(data) == 1 and self.is_matrix(data[0]))
        if (weights and len(data) > 1) or any(self.is_known(tensor) for tensor in indices):
            return self.unknown(func, args, kwargs, inputs, result)
        records = {id(t): (self.record(t) or []) if weights else [self.labels(t)] for t in data}
        moved = []
        for number in range(len(records[id(data[0])])):
            plain = tree_map(lambda leaf, n=number: _label_of(leaf, records, n), (args, kwargs))
            try:
                moved.append(_moved(func, *plain))
            except (RuntimeError, TypeError):
                return self.unknown(func, args, kwargs, inputs, result)
        if len(moved) == data[0].ndim == 2 and _swaps(func, args):
            moved.reverse()  # of a matrix with one entry nothing else tells which of its axes is which
        for tensor, *labels in zip(outputs_of(result), *map(outputs_of, moved), strict=True):
            self.records[id(tensor)] = (tensor, [tidy(each) for each in labels])
            self.origin.pop(id(tensor), None)
            if all(id(each) in self.origin for each in data):  # all of it is made of weights
                self.origin[id(tensor)] = self.origin[id(data[0])] if len(data) == 1 else "computed"
        self.note_places(func, args, data, result)
        return None

    def note_places(self, func: Any, args: Any, data: list[Tensor], result: Any) -> None:
        """Remember which channels are told apart by where they lie, and what is split into equal parts."""
        packet = func._overloadpacket
        splits = packet in SPLITS and any(
            len(varying(new)) > len(varying(old))
            for old, new in zip(self.record(data[0]) or [], self.record(outputs_of(result)[0]) or [], strict=True)
        )
        if packet not in PLACED and not splits:
            return
        axis = args[2] if packet is aten.split and len(args) > 2 else 0
        for labels in self.record(data[0]) or []:
            if varying(labels) and bool((core(labels) > 0).any()):
                self.placed.append((core(labels).reshape(-1), self.where(func)))
            if packet is aten.split and not still(labels, axis % labels.ndim):
                parts = torch.split(core(labels), args[1], axis)
                self.pieces.append(([part.reshape(-1) for part in parts], self.where(func)))

    def pad(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Padding: more positions of the same channels, or constants among the channels."""
        if self.is_weight(args[0]):
            return self.unknown(func, args, kwargs, inputs, result)
        labels, sides = self.labels(args[0]), list(args[1])
        for axis in range(labels.ndim):
            number = 2 * (labels.ndim - 1 - axis)
            if number < len(sides) and still(labels, axis):
                labels = labels.narrow(axis, 0, 1).expand(
                    *labels.shape[:axis], result.shape[axis], *labels.shape[axis + 1 :]
                )
                sides[number : number + 2] = [0, 0]
        self.give(result, func(labels, sides, 0) if any(sides) else labels)
        return None

    def patches(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Patches side by side: every channel as often as a patch has positions."""
        labels = self.labels(args[0])
        if self.is_weight(args[0]) or any(axis != 1 for axis in varying(labels)):
            return self.unknown(func, args, kwargs, inputs, result)
        ids = labels[0, :, 0, 0].repeat_interleave(math.prod(args[1]))
        self.give(result, along(ids, 1, result.shape))
        return None

    def random(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Random numbers of the shape of an activation."""
        if all(tensor.shape == inputs[0].shape for tensor in [*inputs, *outputs_of(result)]):
            return self.pointwise(func, args, kwargs, inputs, result)
        return self.unknown(func, args, kwargs, inputs, result)

    def gate(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """One half of the channels times a function of the other."""
        axis = args[1] if len(args) > 1 else -1
        if self.is_weight(args[0]):
            return self.unknown(func, args, kwargs, inputs, result)
        halves = self.labels(args[0]).chunk(2, axis)
        one, other = cores(*halves)
        self.lock_beside(one, other, self.where(func))
        self.lock_beside(other, one, self.where(func))
        return self.give(result, self.meet(*halves))

    def pointwise(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Join what meets."""
        outputs = outputs_of(result)
        labels = self.joined([tensor for tensor in inputs if not self.is_weight(tensor)], outputs[0].shape, func)
        for tensor in inputs:
            if self.is_weight(tensor) and not self.align(labels, tensor):
                self.lock([tensor], f"{self.where(func)} computes with a weight")
                self.atoms.lock(core(labels), f"{self.where(func)} joins it with a weight of several axes")
        for output in outputs:
            self.give(output, labels)

    def joined(self, tensors: Iterable[Tensor], shape: torch.Size, func: Any) -> Tensor:
        """Join what meets where tensors are broadcast to a shape, and give its labels."""
        given = [(tensor, self.labels(tensor).expand(shape)) for tensor in tensors]
        labels = alike(0, shape)
        wide = {axis for _, own in given for axis in varying(own)}
        for tensor, own in given:
            if varying(own) or not any(_is_broadcast(tensor, axis, own.ndim) for axis in wide):
                labels = self.meet(labels, own)
            else:  # one number for many channels: it can't go, and nothing else depends on it
                self.atoms.lock(core(own), f"{self.where(func)} spreads it over many channels")
        for tensor, own in given:
            if any(not _is_broadcast(tensor, axis, own.ndim) for axis in varying(labels)):
                mine, ours = cores(own, labels)
                self.lock_beside(ours, mine, self.where(func))
        return labels

    def meet(self, left: Tensor, right: Tensor) -> Tensor:
        """Join two tensors of labels, entry by entry, and give what is there of either."""
        one, other = cores(left, right)
        self.atoms.join(one, other)
        return torch.where((one > 0) | (other == 0), one, other).expand(left.shape)

    def align(self, labels: Tensor, weight: Tensor) -> bool:
        """Join labels with the one axis of a weight that goes along with them, if there is one."""
        if not bool((core(labels) > 0).any()):
            return False
        if not any(not _is_broadcast(weight, axis, labels.ndim) for axis in varying(labels)):
            return True  # it doesn't tell channels apart
        for axis in self.record(weight) or []:
            one, other = (self.atoms.find(each).reshape(-1) for each in cores(labels, axis.expand(labels.shape)))
            pairs = set(zip(one.tolist(), other.tolist(), strict=True))
            if varying(axis) and len(pairs) == len(torch.unique(one)):  # every channel meets one index
                self.atoms.join(one, other)
                self.atoms.lock(other[one <= 0], "belongs to what is no channel")
                return True
        return False

    def convolution(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Read channels, give new ones; the groups of a grouped convolution live or die whole."""
        x, weight, bias, _, _, _, transposed, _, groups = args[:9]
        where = self.where(func)
        kernel = math.prod(weight.shape[2:])
        counted = x if transposed else result
        positions = counted.numel() // counted.shape[1]
        if id(weight) not in self.named:
            self.computed.append(
                Use("", positions, kernel, None, torch.zeros(result.shape[1], dtype=torch.long), x.shape[1] // groups)
            )
            reason = f"{where} has a weight that is computed"
            self.lock(inputs, reason)
            return self.void([result], reason)
        name = self.named[id(weight)][0]
        read = self.channels(x, 1, where)
        if groups == 1:
            side, other = (0, 1) if transposed else (1, 0)
            reads, gives = self.axis(name, weight, side), self.axis(name, weight, other)
            self.bind(reads, read, (name, side), where)
            self.uses.append(Use(name, positions, kernel, reads, gives))
        else:
            gives = self.grouped(weight, name, read, groups, transposed, where)
            fixed = weight.shape[0 if transposed else 1] // (groups if transposed else 1)
            self.uses.append(Use(name, positions, kernel, None, gives, fixed))
        if bias is not None:
            self.attach(bias, gives)
        return self.give(result, along(gives, 1, result.shape))

    def grouped(self, weight: Tensor, name: str, read: Tensor, groups: int, transposed: bool, where: str) -> Tensor:
        """Join what each group reads and gives; the labels of what it gives."""
        if transposed:  # its outputs have no axis of their own that spans all groups
            reason = f"{where} is a grouped transposed convolution"
            self.atoms.lock(read, reason)
            self.voids.append(reason)
            return torch.full((weight.shape[1] * groups,), -len(self.voids))
        gives = self.axis(name, weight, 0)
        members = torch.cat([gives.reshape(groups, -1), read.reshape(groups, -1)], dim=1)
        self.atoms.join(members, members[:, :1].expand_as(members))
        self.lock_beside(members, members.min(dim=1, keepdim=True).values.expand_as(members), where)
        return gives

    def bind(self, reads: Tensor, read: Tensor, site: tuple[str, int], where: str) -> None:
        """Let a reader's side follow the channels that it reads."""
        self.atoms.join(reads, read)
        self.lock_beside(reads, read, where)
        if site[0] not in self.parameters:
            self.atoms.lock(reads, f"{where} reads it by a buffer, which no mask is for")
        self.reads.add(site)

    def attach(self, tensor: Tensor, channels: Tensor) -> None:
        """Let a vector (bias, scale, statistic) follow the channels."""
        if (
            self.record(tensor)
            and id(tensor) in self.origin
            and not self.is_weight(tensor)
            and tensor.shape == channels.shape
        ):
            vector = self.labels(tensor)
            self.atoms.join(vector, channels)
            self.lock_beside(channels, vector, "a bias or scale")
            self.atoms.lock(vector[channels <= 0], "belongs to what is no channel")
        else:
            self.atoms.lock(channels, "its bias or scale is computed")

    def matrix_product(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """A linear layer: rows of features times a weight, or a weight times features in columns."""
        *bias, left, right = args
        if self.is_matrix(right) and not self.is_matrix(left):
            found = self.linear(left, 1, right, 0, func)
        elif self.is_matrix(left) and not self.is_matrix(right):
            found = self.linear(right, 0, left, 1, func)
        else:
            found = None
            if id(left) in self.origin or id(right) in self.origin:  # a weight that is computed
                gives = torch.zeros(result.shape[1], dtype=torch.long)
                self.computed.append(Use("", result.shape[0], 1, None, gives, left.shape[1]))
        if found is None or (bias and self.is_matrix(left)):
            return self.unknown(func, args, kwargs, inputs, result)
        if bias:
            self.attach(bias[0], found)
        return self.give(result, along(found, 1 if self.is_matrix(right) else 0, result.shape))

    def linear(self, x: Tensor, features: int, weight: Tensor, side: int, func: Any) -> Tensor | None:
        """Let a matrix read features and give new ones: their atoms, None if it can't be followed."""
        axes, name = self.record(weight) or [], self.origin.get(id(weight), "computed")
        reads, gives = _axis_of(axes, side), _axis_of(axes, 1 - side)
        if reads is None or gives is None or reads is gives or name == "computed":
            return None
        read_ids, given_ids = _line(reads, side), _line(gives, 1 - side)
        site = next((n, a) for (n, a), ids in self.axes.items() if n == name and bool(torch.isin(read_ids[:1], ids)))
        self.bind(read_ids, self.channels(x, features, self.where(func)), site, self.where(func))
        self.uses.append(Use(name, x.shape[1 - features], 1, read_ids, given_ids))
        return given_ids

    def batched_product(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """A product of activations: what is summed over lives or dies together."""
        left, right = args[-2:]
        if any(self.is_weight(tensor) for tensor in inputs):
            if func._overloadpacket is aten.bmm and len(left) == 1:  # a matrix product after all
                pages = [self.page(tensor) for tensor in (left, right)]
                page = result[0]
                self.matrix_product(func, pages, {}, pages, page)
                return self.give(result, self.labels(page)[None])
            return self.unknown(func, args, kwargs, inputs, result)
        # entry (b, i, k) of one meets entry (b, k, j) of the other
        terms = [self.labels(left)[:, :, :, None], self.labels(right)[:, None]]
        shape = [max(sizes) for sizes in zip(*(each.shape for each in terms), strict=True)]
        ours, theirs = (each.expand(shape) for each in terms)
        labels = self.meet(ours, theirs)
        for own, broadcast in ((ours, 3), (theirs, 1)):
            if any(axis != broadcast for axis in varying(labels)):
                here, mine = cores(labels, own)
                self.lock_beside(here, mine, self.where(func))
        if not still(labels, 2):
            small = core(labels)
            self.atoms.join(small, small.narrow(2, 0, 1).expand_as(small))
        if varying(labels) == [2]:  # nothing is left to choose from
            self.atoms.lock(core(labels), f"{self.where(func)} sums over all of it")
            self.void([result], f"{self.where(func)} sums over all channels")
        else:
            self.give(result, labels[:, :, 0])
        if func._overloadpacket is aten.baddbmm:
            self.give(result, self.joined([result, args[0]], result.shape, func))
        return None

    def page(self, tensor: Tensor) -> Tensor:
        """The one matrix of a batch of one."""
        page = tensor[0]
        record = self.record(tensor)
        if record is not None:
            self.records[id(page)] = (page, [labels[0] for labels in record])
        if id(tensor) in self.origin:
            self.origin[id(page)] = self.origin[id(tensor)]
        return page

    def attention(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Scaled dot product attention: a head lives or dies whole."""
        query, key, value = args[:3]
        heads = [self.labels(tensor) for tensor in args[:3]]
        plain = query.ndim == 4 and query.shape[1] == key.shape[1] == value.shape[1]
        if not plain or any(self.is_weight(t) for t in args[:3]) or not all(still(each, 2) for each in heads):
            return self.unknown(func, args, kwargs, inputs, result)
        if query.shape[1] == 1:  # nothing is left to choose from but the values
            self.lock([query, key], f"{self.where(func)} sums over all of it")
            heads = heads[2:]
        for number in range(query.shape[1] if len(heads) > 1 else 0):
            head = torch.cat([core(each[:, number]).reshape(-1) for each in heads])
            self.atoms.join_all(head)
            self.lock_beside(head, head.min().expand_as(head), self.where(func))
        answer, *others = outputs_of(result)
        self.give(answer, heads[-1][:, :, :1].expand(*value.shape[:2], query.shape[2], value.shape[3]))
        self.void(others, f"{self.where(func)} mixes channels")
        scores = heads[-1][:, :, :1, :1].expand(*query.shape[:3], key.shape[2])
        for mask in [tensor for tensor in inputs[3:] if tensor.ndim]:
            spread = mask.expand(scores.shape)
            if self.is_weight(mask):
                if not self.align(scores, mask):
                    self.lock([value, mask], f"{self.where(func)} adds a weight of several axes")
            elif not still(spread, 1):
                own, ours = cores(self.labels(mask).expand(scores.shape), scores)
                self.atoms.join(own, ours)
                self.lock_beside(ours, own, self.where(func))
        return None

    def batch_norm(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Scale and shift per channel."""
        x, *vectors = args[:5]
        channels = self.channels(x, 1, self.where(func))
        for vector in vectors:
            if isinstance(vector, Tensor):
                self.attach(vector, channels)
        answer, *others = outputs_of(result)
        self.give(answer, along(channels, 1, answer.shape))
        self.void(others, f"{self.where(func)} gives statistics")

    def softmax(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Normalise along an axis that must not be the channels'."""
        labels = self.labels(args[0])
        if self.is_weight(args[0]) or not still(labels, args[1] % labels.ndim):
            return self.unknown(func, args, kwargs, inputs, result)
        return self.give(result, labels)

    def reduction(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Sum or choose along axes that must not be the channels'."""
        x = args[0]
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        wanted = given.get("dim")
        axes = list(range(x.ndim)) if wanted is None or wanted == [] else wanted
        axes = [axis % x.ndim for axis in ([axes] if isinstance(axes, int) else axes)] if x.ndim else []
        labels = self.labels(x)
        if self.is_weight(x) or len(inputs) > 1 or not all(still(labels, axis) for axis in axes):
            return self.unknown(func, args, kwargs, inputs, result)
        reduced = first(labels, axes)
        for output in outputs_of(result):
            self.give(output, reduced.reshape(output.shape))
        return None

    def window(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Pool or resize every channel on its own."""
        x = args[0]
        axis = 0 if x.ndim == 2 or ("2d" in func._schema.name and x.ndim == 3) else 1
        answers = outputs_of(result)
        if any(tensor.ndim != x.ndim or tensor.shape[axis] != x.shape[axis] for tensor in [*inputs, *answers]):
            return self.unknown(func, args, kwargs, inputs, result)
        labels = self.channels(x, axis, self.where(func))
        for other in inputs[1:]:  # the places that an unpooling puts values back to
            theirs = self.channels(other, axis, self.where(func))
            self.atoms.join(labels, theirs)
            self.lock_beside(labels, theirs, self.where(func))
        for answer in answers:
            self.give(answer, along(labels, axis, answer.shape))
        return None


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """What becomes of labels; some kernels know no integers."""
    if func._overloadpacket in (aten.view, aten._unsafe_view):
        func = aten.reshape.default  # labels have other strides
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        doubles = tree_map(_as_double, (args, kwargs))
        return tree_map(lambda leaf: leaf.long(), func(*doubles[0], **doubles[1]))


def _label_of(leaf: Any, records: dict[int, list[Tensor]], number: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return records[id(leaf)][number] if id(leaf) in records else leaf.cpu()  # an index


def _as_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.long else leaf


def _axis_of(axes: list[Tensor], side: int) -> Tensor | None:
    """The labels of a matrix's rows (0) or columns (1)."""
    if axes and axes[0].numel() == 1:
        return axes[side]
    along_it = [labels for labels in axes if varying(labels) == [side]]
    if not along_it and axes and axes[0].shape[side] == 1:
        along_it = [labels for labels in axes if not varying(labels)]
    return along_it[0] if len(along_it) == 1 else None


def _swaps(func: Any, args: Any) -> bool:
    """Whether an operation transposes a matrix."""
    packet = func._overloadpacket
    if packet is aten.permute:
        return bool(args[1][0] % 2 == 1)
    return packet is aten.t or (packet is aten.transpose and args[1] % 2 != args[2] % 2)


def _line(labels: Tensor, axis: int) -> Tensor:
    return labels.select(1 - axis, 0).contiguous()


def _is_broadcast(tensor: Tensor, axis: int, ndim: int) -> bool:
    """Whether a tensor has one entry only along an axis of the shape it is broadcast to."""
    own = axis - (ndim - tensor.ndim)
    return own < 0 or tensor.shape[own] == 1


def outputs_of(result: Any) -> list[Tensor]:
    """The tensors that an operation gives."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _nothing(*_: Any) -> None:
    """An operation that asks for a shape only."""
