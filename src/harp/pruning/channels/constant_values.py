"""Constants: which numbers of a run do not depend on the input.

The model runs once on an example, and every tensor gets a tensor of flags: whether an entry depends on the input. Each
operation has a rule for the flags of its result:

* data movement moves the flags, and views of a tensor have views of its flags, so that in-place writes are tracked;
* an element-wise result depends on the input if one of its operands does, except for a product with a constant zero;
* a sum of products (convolution, matrix product) depends on the input if a factor of one of its terms does and the
  other factor isn't zero, so a pruned weight passes nothing on;
* the result of a batch norm in eval mode depends on the input unless its scale is zero; that of pooling and reductions
  does if any entry of the window does;
* the result of any other operation depends on the input.

The values of the constants are those of the run. They may differ between positions, as after a padded convolution.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harp.models.modes import evaluating, slow_attention

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
_EQUAL = 1e-6  # relative: the same sum at several positions differs by rounding


@dataclass
class Reading:
    """What one application of a weight reads, one entry for each index of the weight's input axis."""

    axis: int
    constant: Tensor  # whether it is one number for all inputs and at all positions
    values: Tensor  # that number, in 64 bit
    bare: bool  # whether there is no padding: every output uses the whole kernel
    norm: str | None = None  # the running mean of the batch norm that is the only reader of the output


@torch.inference_mode(False)
@torch.no_grad()
def readings(model: nn.Module, example: Tensor) -> dict[str, list[Reading]]:
    """What each weight of the model reads in eval mode, for all of its applications that can be traced."""
    tracker = _FlagTracker(model, example)
    with evaluating(model), slow_attention(), tracker:
        answer = model(example)
    return tracker.finish(answer)


class _FlagTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Tracks the flags of every tensor of a run; a tensor without flags is constant."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.named = {id(tensor): name for name, tensor in tensors}
        self.matrices = {t.data_ptr(): (name, t) for name, t in tensors if t.ndim == 2}
        self.flags: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the tensor is kept so that its id is not reused
        self.lost: dict[int, Tensor] = {}  # storages that are not tracked any more
        self.readings: dict[str, list[Reading]] = defaultdict(list)
        self.outputs: dict[int, tuple[Tensor, Reading]] = {}  # the outputs of weights, by id
        self.readers: Counter[int] = Counter()  # the number of operations that read a tensor, by id
        self.norms: Counter[str] = Counter()  # the number of uses of a batch norm
        self.put(example, torch.ones((), dtype=torch.bool, device=example.device))

    def finish(self, answer: Any) -> dict[str, list[Reading]]:
        """The readings. A norm is kept only if it is the only reader of its input and is applied once."""
        self.readers.update(id(leaf) for leaf in tree_leaves(answer))
        for key, (_, reading) in self.outputs.items():
            if reading.norm and (self.readers[key] > 1 or self.norms[reading.norm] > 1):
                reading.norm = None
        return dict(self.readings)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.readers.update(id(tensor) for tensor in inputs)
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
        """A tensor's flags, also if they are all false."""
        flags = self.of(tensor)
        return torch.zeros((), dtype=torch.bool, device=tensor.device).expand(tensor.shape) if flags is None else flags

    def put(self, tensor: Tensor, flags: Tensor) -> None:
        """Set the flags of a new tensor, in the tensor's layout so that they can be viewed in the same way."""
        self.flags[id(tensor)] = (tensor, torch.empty_like(tensor, dtype=torch.bool).copy_(flags))

    def lose(self, tensor: Tensor) -> None:
        """Treat all that shares a tensor's memory as dependent on the input."""
        self.lost[tensor.untyped_storage().data_ptr()] = tensor

    def write(self, tensor: Tensor, flags: Tensor) -> None:
        """Set the flags of a tensor that was written into. A constant may have views that are not tracked."""
        old = self.of(tensor)
        if old is None or tensor.untyped_storage().data_ptr() in self.lost:
            self.lose(tensor)
        else:
            old.copy_(flags)

    def follow(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        """Set the flags of an operation's results."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.is_view:
            return self.view(func, args, kwargs, result)
        rule = self.rule(func)
        flags = rule(func, args, kwargs, outputs) if rule else None
        if func._schema.is_mutable:
            first = args[0] if args else None
            if flags is not None and isinstance(first, Tensor) and len(outputs) == 1 and outputs[0] is first:
                return self.write(first, flags)
            for tensor in [*inputs, *outputs]:
                self.lose(tensor)
            return None
        for output in outputs:
            fits = flags is not None and flags.shape == output.shape
            self.put(output, flags if flags is not None and fits else torch.ones_like(output, dtype=torch.bool))
        return None

    def view(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take a view of a tensor's flags for a view of the tensor."""
        inputs, options = tree_map(lambda leaf: self.full(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        try:
            views = [leaf for leaf in tree_leaves(func(*inputs, **options)) if isinstance(leaf, Tensor)]
        except RuntimeError:  # the flags have another layout, or can't be viewed in this way
            views = []
        for number, output in enumerate(outputs):
            if len(views) == len(outputs) and views[number].shape == output.shape:
                self.flags[id(output)] = (output, views[number])
            else:
                self.lose(output)

    # -- rules --------------------------------------------------------------------------------------------------------

    def rule(self, func: Any) -> Callable[..., Tensor | None] | None:
        """The rule of an operation for its result's flags; None if there is no rule."""
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
        """A copy of a tensor, or a copy into the first argument."""
        source = args[1] if func._overloadpacket is aten.copy_ else args[0]
        return self.full(source).to(outputs[0].device).expand(outputs[0].shape)

    def move(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Move the flags as the numbers are moved."""
        if func._overloadpacket is aten._unsafe_view:
            return self.full(args[0]).reshape(outputs[0].shape)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not leaf.is_floating_point() and self.of(leaf) is not None for leaf in leaves):
            return None  # the indices depend on the input
        plain = tree_map(lambda leaf: self.full(leaf).float() if _is_float(leaf) else leaf, (args, kwargs))
        moved: Tensor = func(*plain[0], **plain[1])
        return moved > 0

    def pointwise(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor:
        """The union of the operands' flags, without products with a constant zero."""
        shape = outputs[0].shape
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        flags = torch.zeros(shape, dtype=torch.bool, device=outputs[0].device)
        for tensor in operands:
            flags |= self.full(tensor)
        if func is aten.mul.Tensor:
            for tensor in operands:
                flags &= self.full(tensor) | (tensor != 0)
        return flags

    def convolution(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Whether any input of a nonzero weight depends on the model's input."""
        x, weight, bias, *options = args
        if self.of(weight) is not None or self.of(bias) is not None:
            return None
        terms: Tensor = func(self.full(x).float(), (weight != 0).float(), None, *options)
        return terms > 0.5

    def product(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor:
        """Whether any product has a factor that depends on the input and another that isn't zero."""
        *added, left, right = args[:3] if len(args) > 2 else args
        left_flags, right_flags = self.full(left), self.full(right)
        left_nonzero, right_nonzero = left_flags | (left != 0), right_flags | (right != 0)
        terms = left_flags.float() @ right_nonzero.float() + left_nonzero.float() @ right_flags.float()
        flags: Tensor = terms > 0.5
        for term in added:
            flags = flags | self.full(term)
        return flags

    def batch_norm(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """The input's flags where the scale isn't zero; None in training, as batch statistics depend on all images."""
        x, scale, *others = args[:5]
        names = [argument.name for argument in func._schema.arguments]
        training = dict(zip(names, args, strict=False)).get("training", "with_update" in func._schema.name)
        if training or any(self.of(vector) is not None for vector in (scale, *others)):
            return None
        flags = self.full(x)
        return flags if scale is None else flags & (scale != 0).reshape(-1, *[1] * (x.ndim - 2))

    def reduction(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Whether any entry that is reduced depends on the input."""
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if "other" in arguments:  # max and min of two tensors
            return self.pointwise(func, args, kwargs, outputs)
        axes = arguments.get("dim")
        flags = self.full(args[0])
        reduced = list(range(flags.ndim)) if axes is None or axes == [] else axes
        return flags.any(reduced, keepdim=True).reshape(outputs[0].shape)

    def window(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor:
        """Whether any entry of the window depends on the input; no entry has a negative weight."""
        pooled = func(self.full(args[0]).float(), *args[1:], **kwargs)
        first: Tensor = pooled if isinstance(pooled, Tensor) else pooled[0]
        return first > 0

    # -- what the weights read ----------------------------------------------------------------------------------------

    def note_convolution(self, args: Any, result: Tensor) -> None:
        """Record what a convolution reads; a grouped one is not a reader, as it passes its channels on."""
        x, weight, _, _, padding, _, transposed, _, groups = args[:9]
        if groups == 1 and id(weight) in self.named:
            bare = not transposed and not any(padding)
            self.note(self.named[id(weight)], 0 if transposed else 1, x, 1, bare, result)

    def note_product(self, args: Any, result: Tensor) -> None:
        """Record what a linear layer reads."""
        left, right = args[-2:]
        for matrix, side, x, features in ((right, 0, left, 1), (left, 1, right, 0)):
            name, weight = self.matrices.get(matrix.data_ptr(), (None, matrix))
            if name is not None and matrix.numel() == weight.numel() and weight.is_contiguous():
                axis = 1 if matrix.stride(side) == 1 else 0
                if weight.shape[axis] == x.shape[features]:
                    self.note(name, axis, x, features, True, result)

    def note(self, name: str, axis: int, x: Tensor, channels: int, bare: bool, result: Tensor) -> None:
        """Record which of the channels that a weight reads are constant, and their values."""
        numbers = x.movedim(channels, 0).flatten(1).double()
        low, high = numbers.amin(dim=1), numbers.amax(dim=1)
        same = high - low <= _EQUAL * torch.maximum(low.abs(), high.abs())
        depends = self.full(x).movedim(channels, 0).flatten(1).any(dim=1)
        reading = Reading(axis, same & ~depends, (low + high) / 2, bare)
        self.readings[name].append(reading)
        self.outputs[id(result)] = (result, reading)
        self.readers[id(result)] = 0  # an earlier tensor may have had this id

    def note_norm(self, args: Any) -> None:
        """Record that a batch norm reads the output of a weight."""
        x, mean = args[0], args[3]
        if isinstance(mean, Tensor) and id(mean) in self.named:
            name = self.named[id(mean)]
            self.norms[name] += 1
            if id(x) in self.outputs:
                self.outputs[id(x)][1].norm = name


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
