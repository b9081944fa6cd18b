"""The operations of a run as PyTorch's dispatcher sees them, one by one, and their kinds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

MOVES = {
    aten.view, aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.expand, aten.slice, aten.select,
    aten.squeeze, aten.unsqueeze, aten.split, aten.split_with_sizes, aten.unbind, aten.cat, aten.stack, aten.flip,
    aten.roll, aten.repeat, aten.index_select, aten.index, aten.pixel_shuffle, aten.pixel_unshuffle,
    aten.channel_shuffle, aten.unfold, aten._reshape_alias, aten.view_as_real, aten.diagonal, aten.reflection_pad1d,
    aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d, aten.replication_pad2d,
    aten.replication_pad3d, aten._reshape_copy, aten.rot90, aten.slice_copy,
}  # fmt: skip
COPIES = {aten._to_copy, aten.clone}
POINTWISE = {aten.hardswish, aten.hardswish_, aten._prelu_kernel}  # which PyTorch does not tag as such
REDUCTIONS = {
    aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.max, aten.min, aten.linalg_vector_norm,
    aten.logsumexp,
}  # fmt: skip


class Call:
    """One operation: its function, arguments and result, and the tensors among the arguments and in the result."""

    def __init__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.func, self.args, self.kwargs, self.result = func, args, kwargs, result
        self.inputs, self.outputs = tensors_in((args, kwargs)), tensors_in(result)
        self.packet = func._overloadpacket  # the function without regard to the types of its arguments
        self.name: str = func._schema.name.removeprefix("aten::")
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_pointwise = self.packet in POINTWISE or torch.Tag.pointwise in func.tags

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the function's signature."""
        names = [argument.name for argument in self.func._schema.arguments]
        return (dict(zip(names, self.args, strict=False)) | self.kwargs).get(name, default)

    def reduced_axes(self) -> list[int]:
        """The axes that a reduction sums over."""
        axes, ndim = self.argument("dim"), self.args[0].ndim
        if axes is None or axes == [] or ndim == 0:
            return list(range(ndim))
        return [axis % ndim for axis in ([axes] if isinstance(axes, int) else axes)]


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Shows all operations of a run to a function, each after it was executed."""

    def __init__(self, see: Callable[[Call], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composite operations are not decomposed then
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        self.see(Call(func, args, kwargs, result))
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
