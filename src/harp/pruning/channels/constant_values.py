"""Constants: which numbers of a run are the same whatever the input.

The model is run once on an example, and beside each tensor goes a tensor of flags: whether an entry depends on the
input. Operations do to the flags what they do to the numbers:

* data movement moves them, and views of a tensor have views of its flags, so that writing in place is followed;
* an element-wise result depends on the input if one of its operands does, save for a product with a constant zero;
* a sum of products (convolution, matrix product) does if one of its terms does whose other factor isn't zero, so a
  weight that is pruned passes nothing on;
* a batch norm in eval mode does unless its scale is zero; pooling and reductions do if any entry of the window does;
* whatever isn't known here does.

What the constants are is read off the run. They may change from position to position, as behind a padded convolution.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harp.frozen import frozen
from harp.modes import slow_attention

aten = torch.ops.aten

_MOVES = {
    aten.cat, aten.stack, aten.flip, aten.roll, aten.repeat, aten.index_select, aten.index, aten._unsafe_view,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle, aten.native_channel_shuffle, aten.im2col,
    aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d, aten._reshape_copy,
}  # fmt: skip
_COPIES = {aten._to_copy, aten.clone, aten.contiguous, aten.copy_}
_POINTWISE = {aten.hardswish, aten.hardswish_, aten._prelu_kernel, aten.prelu}
_REDUCTIONS = {
    aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.max, aten.min, aten.logsumexp,
    aten.linalg_vector_norm,
}  # fmt: skip
_WINDOWS = ("avg_pool", "max_pool", "upsample_nearest", "upsample_linear", "upsample_bilinear", "upsample_trilinear")
_EQUAL = 1e-6  # constants that a sum yields at many positions differ by rounding


@dataclass
class Reading:
    """What one application of a weight read, by the index of the weight's reading axis."""

    axis: int
    constant: Tensor  # whether it is one number for all inputs and at all positions
    values: Tensor  # that number, in 64 bit
    bare: bool  # whether every result sees all of the kernel: no padding
    norm: str | None = None  # the running mean of the batch norm that alone takes what the weight gives


@torch.inference_mode(False)
@torch.no_grad()
def readings(model: nn.Module, example: Tensor) -> dict[str, list[Reading]]:
    """What each weight of the model reads in eval mode, at all of its applications that can be followed."""
    watch = _Watch(model, example)
    with frozen(model, example, fast=False) as net, slow_attention(), watch:
        answer = net(example)
    return watch.finish(answer)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The flags beside every tensor of a run; a tensor without any is constant."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.named = {id(tensor): name for name, tensor in tensors}
        self.matrices = {t.data_ptr(): (name, t) for name, t in tensors if t.ndim == 2}
        self.flags: dict[int, tuple[Tensor, Tensor]] = {}  # tensors are held, so that ids stay theirs
        self.lost: dict[int, Tensor] = {}  # storages of which nothing is known any more
        self.found: dict[str, list[Reading]] = defaultdict(list)
        self.given: dict[int, tuple[Tensor, Reading]] = {}  # by what the weights gave
        self.takers: Counter[int] = Counter()  # how many operations took it
        self.norms: Counter[str] = Counter()
        self.put(example, torch.ones((), dtype=torch.bool, device=example.device))

    def finish(self, answer: Any) -> dict[str, list[Reading]]:
        """What was found; a norm counts only if nobody else takes what it takes and it is applied once."""
        self.takers.update(id(leaf) for leaf in tree_leaves(answer))
        for key, (_, reading) in self.given.items():
            if reading.norm and (self.takers[key] > 1 or self.norms[reading.norm] > 1):
                reading.norm = None
        return dict(self.found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.takers.update(id(tensor) for tensor in inputs)
        if func._overloadpacket is aten.convolution:
            self.note_convolution(args, result)
        elif func._overloadpacket in (aten.mm, aten.addmm):
            self.note_product(args, result)
        elif "batch_norm" in func._schema.name:
            self.note_norm(args)
        if torch.Tag.nondeterministic_seeded in func.tags or any(self.of(tensor) is not None for tensor in inputs):
            self.follow(func, args, kwargs, inputs, result)
        return result

    # -- flags --------------------------------------------------------------------------------------------------------

    def of(self, tensor: Any) -> Tensor | None:
        """A tensor's flags; None for a constant."""
        if not isinstance(tensor, Tensor):
            return None
        if tensor.untyped_storage().data_ptr() in self.lost:
            return torch.ones((), dtype=torch.bool, device=tensor.device).expand(tensor.shape)
        return self.flags[id(tensor)][1] if id(tensor) in self.flags else None

    def full(self, tensor: Tensor) -> Tensor:
        """A tensor's flags, also where they are all false."""
        found = self.of(tensor)
        return torch.zeros((), dtype=torch.bool, device=tensor.device).expand(tensor.shape) if found is None else found

    def put(self, tensor: Tensor, flags: Tensor) -> None:
        """Give a new tensor flags, of its own layout so that they can be viewed alike."""
        self.flags[id(tensor)] = (tensor, torch.empty_like(tensor, dtype=torch.bool).copy_(flags))

    def lose(self, tensor: Tensor) -> None:
        """Take all that shares a tensor's memory for dependent on the input."""
        self.lost[tensor.untyped_storage().data_ptr()] = tensor

    def write(self, tensor: Tensor, flags: Tensor) -> None:
        """Set the flags of a tensor that was written into; what was constant may have views that nobody knows of."""
        known = self.of(tensor)
        if known is None or tensor.untyped_storage().data_ptr() in self.lost:
            self.lose(tensor)
        else:
            known.copy_(flags)

    def follow(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Set the flags of an operation's results."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.is_view:
            return self.view(func, args, kwargs, result)
        rule = self.rule(func)
        found = rule(func, args, kwargs, outputs) if rule else None
        if func._schema.is_mutable:
            first = args[0] if args else None
            if found is not None and isinstance(first, Tensor) and len(outputs) == 1 and outputs[0] is first:
                return self.write(first, found)
            for tensor in [*inputs, *outputs]:
                self.lose(tensor)
            return None
        for output in outputs:
            fits = found is not None and found.shape == output.shape
            self.put(output, found if found is not None and fits else torch.ones_like(output, dtype=torch.bool))
        return None

    def view(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A view of a tensor has a view of its flags."""
        mine, options = tree_map(lambda leaf: self.full(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        try:
            found = [leaf for leaf in tree_leaves(func(*mine, **options)) if isinstance(leaf, Tensor)]
        except RuntimeError:  # another layout, or no such view of flags
            found = []
        for number, output in enumerate(outputs):
            if len(found) == len(outputs) and found[number].shape == output.shape:
                self.flags[id(output)] = (output, found[number])
            else:
                self.lose(output)

    # -- rules --------------------------------------------------------------------------------------------------------

    def rule(self, func: Any) -> Callable[..., Tensor | None] | None:
        """How an operation acts on flags; None for those that aren't known."""
        packet, name = func._overloadpacket, func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if packet in _COPIES:
            return self.copy
        if packet in _MOVES:
            return self.move
        if packet is aten.constant_pad_nd:
            return lambda func, args, kwargs, outputs: func(self.full(args[0]), args[1], 0)
        if packet is aten.convolution:
            return self.convolution
        if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
            return self.product
        if "batch_norm" in name:
            return self.batch_norm
        if packet is aten._softmax or packet is aten._log_softmax:
            return lambda func, args, kwargs, outputs: self.full(args[0]).any(args[1], True).expand(outputs[0].shape)
        if packet in _REDUCTIONS:
            return self.reduction
        if any(part in name for part in _WINDOWS):
            return self.window
        if packet in _POINTWISE or torch.Tag.pointwise in func.tags:
            return self.pointwise
        return None

    def copy(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor:
        """Another tensor of the same numbers, or written into the first."""
        source = args[1] if func._overloadpacket is aten.copy_ else args[0]
        return self.full(source).to(outputs[0].device).expand(outputs[0].shape)

    def move(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Do to the flags what is done to the numbers."""
        if func._overloadpacket is aten._unsafe_view:
            return self.full(args[0]).reshape(outputs[0].shape)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not leaf.is_floating_point() and self.of(leaf) is not None for leaf in leaves):
            return None  # where it is taken from depends on the input
        plain = tree_map(lambda leaf: self.full(leaf).float() if _is_float(leaf) else leaf, (args, kwargs))
        moved: Tensor = func(*plain[0], **plain[1])
        return moved > 0

    def pointwise(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor:
        """Depend on what any operand depends on; a constant zero makes a product zero."""
        shape = outputs[0].shape
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = torch.zeros(shape, dtype=torch.bool, device=outputs[0].device)
        for tensor in given:
            found |= self.full(tensor)
        if func is aten.mul.Tensor:
            for tensor in given:
                found &= self.full(tensor) | (tensor != 0)
        return found

    def convolution(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Sum over the weights that aren't zero."""
        x, weight, bias, *options = args
        if self.of(weight) is not None or self.of(bias) is not None:
            return None
        terms: Tensor = func(self.full(x).float(), (weight != 0).float(), None, *options)
        return terms > 0.5

    def product(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor:
        """Sum over the pairs of which one depends on the input and the other isn't zero."""
        *added, left, right = args[:3] if len(args) > 2 else args
        ours, theirs = self.full(left), self.full(right)
        one, other = ours | (left != 0), theirs | (right != 0)
        found: Tensor = (ours.float() @ other.float() + one.float() @ theirs.float()) > 0.5
        for term in added:
            found = found | self.full(term)
        return found

    def batch_norm(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Scale and shift; the statistics of a batch depend on all of it."""
        x, scale, *others = args[:5]
        names = [argument.name for argument in func._schema.arguments]
        training = dict(zip(names, args, strict=False)).get("training", "with_update" in func._schema.name)
        if training or any(self.of(vector) is not None for vector in (scale, *others)):
            return None
        found = self.full(x)
        return found if scale is None else found & (scale != 0).reshape(-1, *[1] * (x.ndim - 2))

    def reduction(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Depend on any of what is reduced."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if "other" in given:
            return self.pointwise(func, args, kwargs, outputs)
        axes = given.get("dim")
        flags = self.full(args[0])
        whole = list(range(flags.ndim)) if axes is None or axes == [] else axes
        return flags.any(whole, keepdim=True).reshape(outputs[0].shape)

    def window(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor:
        """Depend on any entry of the window: no entry has a negative share."""
        found = func(self.full(args[0]).float(), *args[1:], **kwargs)
        first: Tensor = found if isinstance(found, Tensor) else found[0]
        return first > 0

    # -- what the weights read ----------------------------------------------------------------------------------------

    def note_convolution(self, args: Any, result: Tensor) -> None:
        """Write down what a convolution reads; a grouped one passes its channels on instead."""
        x, weight, _, _, padding, _, transposed, _, groups = args[:9]
        if groups == 1 and id(weight) in self.named:
            bare = not transposed and not any(padding)
            self.note(self.named[id(weight)], 0 if transposed else 1, x, 1, bare, result)

    def note_product(self, args: Any, result: Tensor) -> None:
        """Write down what a linear layer reads."""
        left, right = args[-2:]
        for matrix, side, x, features in ((right, 0, left, 1), (left, 1, right, 0)):
            name, weight = self.matrices.get(matrix.data_ptr(), (None, matrix))
            if name is not None and matrix.numel() == weight.numel() and weight.is_contiguous():
                axis = 1 if matrix.stride(side) == 1 else 0
                if weight.shape[axis] == x.shape[features]:
                    self.note(name, axis, x, features, True, result)

    def note(self, name: str, axis: int, x: Tensor, channels: int, bare: bool, result: Tensor) -> None:
        """Write down what is constant of all that a weight reads."""
        numbers = x.movedim(channels, 0).flatten(1).double()
        low, high = numbers.amin(dim=1), numbers.amax(dim=1)
        same = high - low <= _EQUAL * torch.maximum(low.abs(), high.abs())
        depends = self.full(x).movedim(channels, 0).flatten(1).any(dim=1)
        reading = Reading(axis, same & ~depends, (low + high) / 2, bare)
        self.found[name].append(reading)
        self.given[id(result)] = (result, reading)
        self.takers[id(result)] = 0  # another tensor may have had this id before

    def note_norm(self, args: Any) -> None:
        """Write down that a batch norm takes what a weight gives."""
        x, mean = args[0], args[3]
        if isinstance(mean, Tensor) and id(mean) in self.named:
            name = self.named[id(mean)]
            self.norms[name] += 1
            if id(x) in self.given:
                self.given[id(x)][1].norm = name


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
