"""The cost of channels: FLOPs, MACs, parameters and memory, as functions of how many channels each space keeps.

FLOPs        positions · gives · (2 · kernel · reads + 1) of every weight, as the paper counts them (a multiply-add
             is two, less one for the first sum, plus a bias and an activation)
MACs         positions · kernel · reads · gives
parameters   all of them, biases and norms too
memory       bytes of the parameters and of the layers' outputs for one image, in 32 bit
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from harp.pruning.channels.spaces import Space
from harp.pruning.channels.traces import Site, Trace
from harp.pruning.channels.tracing import trace

_BYTES = 4
_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Product:
    """A cost `price · (channels read) · (channels written)`; a side may be atoms or a fixed number."""

    price: int
    reads: Tensor | int
    gives: Tensor | int


def flops(model: nn.Module, trace: Trace) -> Iterator[Product]:
    """FLOPs for one image."""
    for use in (*trace.uses, *trace.computed):
        yield Product(2 * use.kernel * use.positions, use.reads, use.gives)
        yield Product(use.positions, 1, use.gives)


def macs(model: nn.Module, trace: Trace) -> Iterator[Product]:
    """Multiply-accumulates for one image."""
    for use in (*trace.uses, *trace.computed):
        yield Product(use.kernel * use.positions, use.reads, use.gives)


def parameters(model: nn.Module, trace: Trace) -> Iterator[Product]:
    """Parameters."""
    sites: dict[str, list[Site]] = {}
    for site, shared in zip(trace.sites, trace.shared(), strict=True):
        if shared:  # other axes are never cut
            sites.setdefault(site.name, []).append(site)
    for name, parameter in model.named_parameters():
        axes = sites.get(name, [])
        rest = parameter.numel() // math.prod(parameter.shape[site.axis] for site in axes)
        yield Product(rest, *(site.atoms for site in axes), *[1] * (2 - len(axes)))


def memory(model: nn.Module, trace: Trace) -> Iterator[Product]:
    """Bytes of the parameters and of all layers' outputs for one image."""
    for product in parameters(model, trace):
        yield Product(_BYTES * product.price, product.reads, product.gives)
    for use in (*trace.uses, *trace.computed):
        yield Product(_BYTES * use.positions, 1, use.gives)


TARIFFS: dict[str, tuple[Callable[[nn.Module, Trace], Iterator[Product]], str]] = {
    "flops": (flops, "FLOPs"),
    "macs": (macs, "MACs"),
    "parameters": (parameters, "parameters"),
    "memory": (memory, "bytes"),
}
"""The cost functions of the budgets, and the names of their units."""


def price(model: nn.Module, example: Tensor, budget: str) -> int:
    """The cost of a whole network, including the channels that can't be pruned."""
    traced = trace(model, example)
    return tariff(traced, [], TARIFFS[budget][0](model, traced)).exact([])


@dataclass(frozen=True)
class Tariff:
    """The cost as a function of the channel counts: a sum of products of two factors, each linear in the counts.

    cost(n) = Σ_t price_t · (R n + r)_t · (G n + g)_t
    """

    prices: _Integers
    reads: _Integers  # R, one row a product, one column a space
    read: _Integers  # r
    gives: _Integers
    given: _Integers

    def exact(self, counts: Sequence[int]) -> int:
        """The cost of keeping so many channels of each space."""
        n = np.asarray(counts, dtype=np.int64)
        return int((self.prices * (self.reads @ n + self.read) * (self.gives @ n + self.given)).sum())

    def slope(self, counts: _Floats) -> tuple[float, _Floats]:
        """The cost at real counts, and its gradient."""
        read, given = self.reads @ counts + self.read, self.gives @ counts + self.given
        gradient = (self.prices * given) @ self.reads + (self.prices * read) @ self.gives
        return float((self.prices * read * given).sum()), gradient

    def soft(self, counts: Tensor) -> Tensor:
        """The cost at real counts, for autograd."""
        prices, reads, read, gives, given = (
            torch.as_tensor(m, dtype=counts.dtype, device=counts.device)
            for m in (self.prices, self.reads, self.read, self.gives, self.given)
        )
        return (prices * (reads @ counts + read) * (gives @ counts + given)).sum()


def tariff(trace: Trace, prunable: Sequence[Space], products: Iterable[Product]) -> Tariff:
    """The tariff of costs that are given over atoms: the same costs over the counts of the spaces."""
    owner = {atom: number for number, space in enumerate(prunable) for atom in space.atoms}

    def factor(side: Tensor | int) -> tuple[list[int], int]:
        """The number of indices that one channel of each space takes, and the number that always stays."""
        if isinstance(side, int):
            return [0] * len(prunable), side
        counts = Counter(owner.get(atom) for atom in trace.atoms.find(side).tolist())
        return [counts[number] // len(space.atoms) for number, space in enumerate(prunable)], counts[None]

    rows = [(product.price, *factor(product.reads), *factor(product.gives)) for product in products]
    return Tariff(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))
