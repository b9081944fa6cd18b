"""A trial cut: what tracing promises is tried on the model itself before anybody relies on it.

Some channels of every space are cut out of a copy with shaken weights, and its answer must be that of a copy in which
they are only masked. A space that fails, because forward reshapes by fixed numbers for instance, is left whole, with
the line of the model where it failed. Where a module remembers a number that should shrink along (the number of
attention heads), that is found here as well, by trying.
"""

import copy
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harp.channels.cutting import plan
from harp.channels.spaces import Space, Whole
from harp.channels.tracing import Trace

TOLERANCE = 1e-4  # relative to the largest entry, in 32 bit and through many layers


class Trial:
    """A model's shaken copy, on which cuts are tried."""

    def __init__(self, model: nn.Module, example: Tensor, trace: Trace) -> None:
        self.example, self.trace = example, trace
        self.model = shaken(model)

    def survivors(self, found: Sequence[Space]) -> tuple[list[Space], list[Whole]]:
        """The spaces that can be cut, some of them with numbers that go along, and those that can't."""
        good, whole = self._halve([space for space in found if len(space.atoms) > 1])
        while good and (reason := self.failure(good)):  # each alone is fine: leave out what spoils it for the others
            bad = next((s for i, s in enumerate(good) if self.failure(good[: i + 1])), good[-1])
            good.remove(bad)
            whole.append(_whole(bad, reason))
        singles = [_whole(space, "one channel, which must stay") for space in found if len(space.atoms) == 1]
        order = {space.name: number for number, space in enumerate(found)}
        return sorted(good, key=lambda space: order[space.name]), [*whole, *singles]

    def _halve(self, found: Sequence[Space]) -> tuple[list[Space], list[Whole]]:
        reason = self.failure(found) if found else None
        if reason is None:
            return list(found), []
        if len(found) == 1:
            mended = next((space for space in self._mended(found[0]) if self.failure([space]) is None), None)
            return ([mended], []) if mended else ([], [_whole(found[0], reason)])
        middle = len(found) // 2
        (good, whole), (more, others) = self._halve(found[:middle]), self._halve(found[middle:])
        return [*good, *more], [*whole, *others]

    def _mended(self, space: Space) -> Iterator[Space]:
        """The space with more and more of the numbers that its modules seem to remember."""
        names = [name.rpartition(".")[0] for name in [*space.readers, *space.givers]]
        owners = list(dict.fromkeys([*names, *(name.rpartition(".")[0] for name in names)]))
        swaps = [name for name in owners if type(self.model.get_submodule(name)) is nn.MultiheadAttention]
        units = len(space.atoms)
        widths = {len(site.atoms) for site in self.trace.sites if site.name in space.givers}
        shares = {units: 1} | {width: width // units for width in widths if width > units and width % units == 0}
        for wanted in ([units], list(shares)):
            numbers = {}
            for owner in owners:
                for attribute, value in vars(self.model.get_submodule(owner)).items():
                    counts = type(value) is int and value in wanted and (value in widths or "head" in attribute)
                    if counts and attribute not in _KNOWN:
                        numbers[owner, attribute] = shares[value]
            yield replace(space, numbers=numbers, swaps=swaps)

    @torch.no_grad()
    def failure(self, found: Sequence[Space]) -> str | None:
        """Why these spaces can't be cut together; None if they can."""
        for some in (_one, _half):
            dead = {atom for space in found for atom in some(space.atoms)}
            with masked(self.model, self.trace, dead):
                expected = self.model(self.example)
            try:
                answer = plan(self.model, self.trace, found, dead).applied(self.model, share=True)(self.example)
            except Exception as error:  # forward may do anything
                return f"{_line(error)}: {(str(error).splitlines() or [type(error).__name__])[0]}"
            if not difference(answer, expected) <= TOLERANCE:
                return "without it the answer changes"
        return None


_KNOWN = {"in_channels", "out_channels", "in_features", "out_features", "num_features", "groups", "training"}


@contextmanager
def masked(model: nn.Module, trace: Trace, dead: set[int]) -> Iterator[None]:
    """Let nobody read the dead channels for a while."""
    gone = torch.tensor(sorted(dead), dtype=torch.long)
    before = []
    for site in trace.sites:
        where = torch.isin(trace.atoms.find(site.atoms), gone).nonzero().reshape(-1)
        if site.reads and len(where):
            weight, where = model.get_parameter(site.name).data, where.to(model.get_parameter(site.name).device)
            before.append((weight, site.axis, where, weight.index_select(site.axis, where)))
            weight.index_fill_(site.axis, where, 0.0)
    try:
        yield
    finally:
        for weight, axis, where, values in reversed(before):
            weight.index_copy_(axis, where, values)


def difference(answer: Any, expected: Any) -> float:
    """How far two answers of a model are apart, relative to the largest entry; infinite if they are of other shapes."""
    ours, theirs = (_leaves(each) for each in (answer, expected))
    if [leaf.shape for leaf in ours] != [leaf.shape for leaf in theirs]:
        return float("inf")
    gaps = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True)]
    return max(gaps, default=0.0)


def _leaves(answer: Any) -> list[Tensor]:
    """The tensors of an answer, also of a class of somebody's own."""
    found = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    others = [leaf for leaf in tree_leaves(answer) if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__")]
    return [*found, *(leaf for other in others for leaf in _leaves(list(vars(other).values())))]


@torch.no_grad()
def shaken(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose weights are off by a little, so that no branch is silent, as fresh ones can be."""
    made = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in made.parameters():
        if tensor.is_floating_point():
            spread = max(0.3 * float(tensor.float().std(correction=0)), 0.02)
            tensor.add_((spread * torch.randn(tensor.shape, generator=generator)).to(tensor))
    for module in made.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_var is not None:
            noise = torch.rand(2, module.num_features, generator=generator).to(module.running_var)
            module.running_mean.add_(0.2 * noise[0] - 0.1)  # type: ignore[operator]
            module.running_var.mul_(0.75 + 0.5 * noise[1])
    return made


def _one(atoms: Sequence[int]) -> Sequence[int]:
    return [atoms[len(atoms) // 3]]


def _half(atoms: Sequence[int]) -> Sequence[int]:
    """Every other channel of the second third and the last one: no pattern that a reshape could hide."""
    third = len(atoms) // 3
    return [*atoms[third : 2 * third : 2], atoms[-1]]


def _whole(space: Space, reason: str) -> Whole:
    return Whole(space.readers, len(space.atoms), reason)


def _line(error: Exception) -> str:
    """The innermost line of the model's own code that an error went through."""
    inner = Path(torch.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(inner)]
    frame = frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
