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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from harp.models.modes import evaluating, slow_attention
from harp.pruning.operations import COPIES, MOVES, REDUCTIONS, Call, Watcher, aten, tensors_in

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
    with evaluating(model), slow_attention(), Watcher(tracker.see):
        answer = model(example)
    return tracker.finish(answer)


class _FlagTracker:
    """Tracks the flags of every tensor of a run; a tensor without flags is constant."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
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

    def see(self, call: Call) -> None:
        """Take note of what an operation reads, and set the flags of its results."""
        self.readers.update(id(tensor) for tensor in call.inputs)
        if call.packet is aten.convolution:
            self.note_convolution(call)
        elif call.packet in (aten.mm, aten.addmm):
            self.note_product(call)
        elif "batch_norm" in call.name:
            self.note_norm(call)
        if call.is_random or any(self.of(tensor) is not None for tensor in call.inputs):
            self.follow(call)

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

    def follow(self, call: Call) -> None:
        """Set the flags of an operation's results."""
        if call.func.is_view:
            return self.view(call)
        flags = self.rule(call)
        if not call.func._schema.is_mutable:
            depends = torch.ones((), dtype=torch.bool)
            for output in call.outputs:
                self.put(output, depends if flags is None or flags.shape != output.shape else flags)
            return None
        target = call.args[0] if call.args else None
        if flags is None or len(call.outputs) != 1 or call.outputs[0] is not target:
            for tensor in [*call.inputs, *call.outputs]:
                self.lose(tensor)
        elif id(target) in self.flags:
            self.flags[id(target)][1].copy_(flags)
        else:  # a constant may have views that are not tracked
            self.lose(target)
        return None

    def view(self, call: Call) -> None:
        """Take a view of a tensor's flags for a view of the tensor."""
        trees = (call.args, call.kwargs)
        args, kwargs = tree_map(lambda leaf: self.full(leaf) if isinstance(leaf, Tensor) else leaf, trees)
        try:
            views = tensors_in(call.func(*args, **kwargs))
        except RuntimeError:  # the flags have another layout, or can't be viewed in this way
            views = []
        for number, output in enumerate(call.outputs):
            if len(views) == len(call.outputs) and views[number].shape == output.shape:
                self.flags[id(output)] = (output, views[number])
            else:
                self.lose(output)

    # -- rules --------------------------------------------------------------------------------------------------------

    def rule(self, call: Call) -> Tensor | None:
        """The flags of an operation's result; None if there is no rule for it."""
        packet, args = call.packet, call.args
        if call.is_random:
            return None
        if packet in COPIES or packet is aten.copy_:
            return self.full(args[packet is aten.copy_]).to(call.outputs[0].device).expand(call.outputs[0].shape)
        if packet in MOVES or packet is aten.im2col:
            return self.move(call)
        if packet is aten.constant_pad_nd:
            padded: Tensor = call.func(self.full(args[0]), args[1], 0)
            return padded
        if packet is aten.convolution:
            return self.convolution(call)
        if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
            return self.product(call)
        if "batch_norm" in call.name:
            return self.batch_norm(call)
        if packet in (aten._softmax, aten._log_softmax):
            return self.full(args[0]).any(args[1], keepdim=True).expand(args[0].shape)
        if packet in REDUCTIONS and call.argument("other") is None:
            return self.full(args[0]).any(call.reduced_axes(), keepdim=True).reshape(call.outputs[0].shape)
        if any(part in call.name for part in _WINDOWS):  # no entry has a negative weight
            return tensors_in(call.func(self.full(args[0]).float(), *args[1:], **call.kwargs))[0] > 0
        return self.pointwise(call) if call.is_pointwise or packet in REDUCTIONS else None

    def move(self, call: Call) -> Tensor | None:
        """Move the flags as the numbers are moved."""
        if call.packet is aten._unsafe_view:
            return self.full(call.args[0]).reshape(call.outputs[0].shape)
        if any(not tensor.is_floating_point() and self.of(tensor) is not None for tensor in call.inputs):
            return None  # the indices depend on the input

        def flags_of(leaf: Any) -> Any:
            return self.full(leaf).float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        args, kwargs = tree_map(flags_of, (call.args, call.kwargs))
        moved: Tensor = call.func(*args, **kwargs)
        return moved > 0

    def pointwise(self, call: Call) -> Tensor:
        """The union of the operands' flags, without products with a constant zero."""
        flags = torch.zeros(call.outputs[0].shape, dtype=torch.bool, device=call.outputs[0].device)
        for tensor in call.inputs:
            flags |= self.full(tensor)
        if call.func is aten.mul.Tensor:
            for tensor in call.inputs:
                flags &= self.full(tensor) | (tensor != 0)
        return flags

    def convolution(self, call: Call) -> Tensor | None:
        """Whether any input of a nonzero weight depends on the model's input."""
        x, weight, bias, *options = call.args
        if self.of(weight) is not None or self.of(bias) is not None:
            return None
        terms: Tensor = call.func(self.full(x).float(), (weight != 0).float(), None, *options)
        return terms > 0.5

    def product(self, call: Call) -> Tensor:
        """Whether any product has a factor that depends on the input and another that isn't zero."""
        *added, left, right = call.args
        left_flags, right_flags = self.full(left), self.full(right)
        left_nonzero, right_nonzero = left_flags | (left != 0), right_flags | (right != 0)
        terms = left_flags.float() @ right_nonzero.float() + left_nonzero.float() @ right_flags.float()
        flags: Tensor = terms > 0.5
        for term in added:
            flags = flags | self.full(term)
        return flags

    def batch_norm(self, call: Call) -> Tensor | None:
        """The input's flags where the scale isn't zero; None in training, as batch statistics depend on all images."""
        x, scale, *others = call.args[:5]
        training = call.argument("training", "with_update" in call.name)
        if training or any(self.of(vector) is not None for vector in (scale, *others)):
            return None
        flags = self.full(x)
        return flags if scale is None else flags & (scale != 0).reshape(-1, *[1] * (x.ndim - 2))

    # -- what the weights read ----------------------------------------------------------------------------------------

    def note_convolution(self, call: Call) -> None:
        """Record what a convolution reads; a grouped one is not a reader, as it passes its channels on."""
        x, weight, _, _, padding, _, transposed, _, groups = call.args[:9]
        if groups == 1 and id(weight) in self.named:
            bare = not transposed and not any(padding)
            self.note(self.named[id(weight)], 0 if transposed else 1, x, 1, bare, call.result)

    def note_product(self, call: Call) -> None:
        """Record what a linear layer reads."""
        left, right = call.args[-2:]
        for matrix, side, x, features in ((right, 0, left, 1), (left, 1, right, 0)):
            name, weight = self.matrices.get(matrix.data_ptr(), (None, matrix))
            if name is not None and matrix.numel() == weight.numel() and weight.is_contiguous():
                axis = 1 if matrix.stride(side) == 1 else 0
                if weight.shape[axis] == x.shape[features]:
                    self.note(name, axis, x, features, True, call.result)

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

    def note_norm(self, call: Call) -> None:
        """Record that a batch norm reads the output of a weight."""
        x, mean = call.args[0], call.args[3]
        if name := self.named.get(id(mean)):
            self.norms[name] += 1
            if id(x) in self.outputs:
                self.outputs[id(x)][1].norm = name
