"""The cost of channels: the tariffs of FLOPs, MACs, parameters and memory.

FLOPs        positions · gives · (2 · kernel · reads + 1) of every weight, as the paper counts them (a multiply-add
             is two, less one for the first sum, plus a bias and an activation)
MACs         positions · kernel · reads · gives
parameters   all of them, biases and norms too
memory       bytes of the parameters and of the layers' outputs for one image, in 32 bit
"""

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from harp.pruning.channels.spaces import Product
from harp.pruning.channels.traces import Site, Trace
from harp.pruning.channels.tracing import trace

_BYTES = 4


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
    products, _ = TARIFFS[budget]
    return sum(p.price * _count(p.reads) * _count(p.gives) for p in products(model, trace(model, example)))


def _count(side: Tensor | int) -> int:
    return side if isinstance(side, int) else len(side)
