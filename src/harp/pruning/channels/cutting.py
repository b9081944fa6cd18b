"""Cutting channels out of a model: the same module, with smaller tensors.

A cut is described by the indices that each tensor keeps and by the sizes that modules store as attributes. The
description is plain data, so that the smaller network can be rebuilt from a file of its weights.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.pruning.channels.attention import Attention
from harp.pruning.channels.rebuild import shrink
from harp.pruning.channels.spaces import Space
from harp.pruning.channels.traces import Trace

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Cut:
    """What a smaller network keeps of a larger one.

    `kept` names the tensors that shrink, with the indices kept along each axis, and `shapes` their shapes before;
    `sizes` are new values of module attributes, by the names of the module and the attribute; `swapped` are the
    attention modules that are replaced by `Attention`; `added` are biases that only the smaller network has.
    """

    kept: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    swapped: list[str] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)

    def slice(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a tensor that is kept."""
        for axis, indices in self.kept.get(name, {}).items():
            tensor = tensor.index_select(axis, torch.tensor(indices, dtype=torch.long, device=tensor.device))
        return tensor

    def spread(self, name: str, small: Tensor, into: Tensor) -> Tensor:
        """A copy of a large tensor, with the small one written at the indices that it was cut from."""
        full, axes = into.clone(), self.kept.get(name, {})
        if not axes:
            return full.copy_(small)
        indices = [
            torch.tensor(list(axes.get(axis, range(size))), device=full.device) for axis, size in enumerate(full.shape)
        ]
        full[torch.meshgrid(*indices, indexing="ij")] = small.to(full)
        return full

    def widen(self, name: str, small: Tensor) -> Tensor:
        """The small tensor in the large shape, filled with zeros, or with ones for a norm's variance."""
        if name not in self.kept:
            return small
        fill = 1.0 if name.endswith("running_var") else 0.0
        return self.spread(name, small, small.new_full(self.shapes[name], fill))

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Shrink a model in place; tensors that are shared stay shared."""
        self._check(model)
        large = dict(named_tensors(model))
        small = {name: self.slice(name, large[name].detach()) for name in self.kept if name in large}
        added = [name for name in self.added if name not in large]
        for name in added:
            weight = name.removesuffix("bias") + "weight"
            small[name] = large[weight].new_zeros(len(small.get(weight, large[weight])))
        shrink(model, {**vars(self), "added": added}, small, Attention)

    def _check(self, model: nn.Module) -> None:
        """Raise an error for a model that the cut does not fit, before anything is changed."""
        actual = {name: list(tensor.shape) for name, tensor in named_tensors(model)}
        modules = dict(model.named_modules())
        for name, shape in self.shapes.items():
            if name not in self.added and actual.get(name) != shape:
                raise ModelError(f"the cut is of another model: {name!r} is {actual.get(name)} here and {shape} there")
        for name, axes in self.kept.items():
            for axis, indices in axes.items():
                if name not in self.shapes or not 0 <= axis < len(self.shapes[name]):
                    raise ModelError(f"the cut has no shape for axis {axis} of {name!r}")
                if not indices or not 0 <= min(indices) <= max(indices) < self.shapes[name][axis]:
                    raise ModelError(f"the cut keeps indices of {name!r} that are not there")
        for owner, numbers in self.sizes.items():
            for attribute, number in numbers.items():
                if owner not in modules or type(getattr(modules[owner], attribute, None)) is not int or number < 1:
                    raise ModelError(f"the cut sets {owner}.{attribute} to {number}: no such number in this model")
        for name in self.swapped:
            if not isinstance(modules.get(name), nn.MultiheadAttention):
                raise ModelError(f"the cut replaces {name!r}, which is no attention of this model")

    def applied(self, model: nn.Module, *, share: bool = False) -> nn.Module:
        """A smaller copy of a model; with `share` it uses the same tensors where their size does not change."""
        shared = {id(tensor): tensor for _, tensor in named_tensors(model) if share}
        small = copy.deepcopy(model, dict(shared))
        self.apply(small)
        return small

    def as_dict(self) -> dict[str, Any]:
        """The description as plain data."""
        kept = {name: {str(axis): indices for axis, indices in axes.items()} for name, axes in self.kept.items()}
        return {**asdict(self), "kept": kept}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Cut":
        """Read a description."""
        try:
            kept = {n: {int(a): [int(i) for i in ix] for a, ix in axes.items()} for n, axes in content["kept"].items()}
            sizes = {m: {str(a): int(v) for a, v in values.items()} for m, values in content["sizes"].items()}
            swapped = [str(name) for name in content["swapped"]]
            shapes = {str(name): [int(size) for size in shape] for name, shape in content["shapes"].items()}
            added = [str(name) for name in content["added"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"this describes no smaller network: {type(error).__name__} {error}") from error
        return cls(kept, sizes, swapped, shapes, added)


def plan(model: nn.Module, trace: Trace, spaces: Sequence[Space], dead: Collection[int]) -> Cut:
    """The cut that removes these atoms."""
    gone = trace.atoms.flags(dead)
    kept: dict[str, dict[int, list[int]]] = {}
    for site, roots in zip(trace.sites, trace.roots, strict=True):
        stays = ~gone[roots]
        if not bool(stays.all()):
            kept.setdefault(site.name, {})[site.axis] = stays.nonzero().reshape(-1).tolist()
    sizes: dict[str, dict[str, int]] = {}
    swapped: dict[str, None] = {}
    for space in spaces:
        removed = sum(atom in dead for atom in space.atoms)
        if removed:
            swapped.update(dict.fromkeys(space.swaps))
            for (owner, attribute), share in space.numbers.items():
                numbers = sizes.setdefault(owner, {})
                before = numbers.get(attribute, getattr(model.get_submodule(owner), attribute))
                numbers[attribute] = before - share * removed
    tensors = dict(named_tensors(model))
    cut = {id(tensors[name]): name for name in kept}
    grouped = {use.name for use in trace.uses if isinstance(use.reads, int)}
    for alias, tensor in tensors.items():  # a shared tensor has several owners, and all of them store its size
        if name := cut.get(id(tensor)):
            owner, _, attribute = alias.rpartition(".")
            numbers = _sizes(model.get_submodule(owner), attribute, kept[name], name in grouped)
            if numbers:
                sizes.setdefault(owner, {}).update(numbers)
    shapes = {name: list(tensors[name].shape) for name in kept}
    return Cut(kept, sizes, list(swapped), shapes)


_SIZES: list[tuple[tuple[type[nn.Module], ...], tuple[str, ...]]] = [  # the attribute that stores each axis's size
    ((nn.modules.batchnorm._NormBase,), ("num_features",)),
    ((nn.PReLU,), ("num_parameters",)),
    ((nn.Linear,), ("out_features", "in_features")),
    (_CONVOLUTIONS, ("out_channels", "in_channels")),
    (_TRANSPOSED, ("in_channels", "out_channels")),
]


def _sizes(module: nn.Module, attribute: str, kept: Mapping[int, list[int]], grouped: bool) -> dict[str, int]:
    """The new values of a layer's attributes that depend on a tensor's shape."""
    left = {axis: len(indices) for axis, indices in kept.items()}
    if attribute != "weight" and not isinstance(module, nn.modules.batchnorm._NormBase):
        return {}
    if isinstance(module, _CONVOLUTIONS) and grouped:
        groups = module.groups * left[0] // module.out_channels
        return {"groups": groups, "out_channels": left[0], "in_channels": module.in_channels // module.groups * groups}
    names = next((names for kinds, names in _SIZES if isinstance(module, kinds)), ())
    return {name: left[axis] for axis, name in enumerate(names) if axis in left}


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, by all of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
