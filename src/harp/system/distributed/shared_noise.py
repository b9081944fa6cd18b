"""Random numbers for a batch that is distributed over processes, the same as one process would draw for all of it.

    with shared(seed, rank=1, world=4):
        uniform(x)      # every fourth row of what `shared(seed, 0, 1)` gives for the whole batch

Outside of `shared`, numbers come from torch's default generator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Part:
    """The rows of a batch that this process has, and generators that are seeded the same in all processes."""

    seed: int
    rank: int
    world: int
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator for a device: torch requires that it is on the device of its numbers."""
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


_part: _Part | None = None  # not a context variable, which `torch.compile` does not support


@contextmanager
def shared(seed: int, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Inside this context, draw from `seed` the numbers of the rows `rank`, `rank + world`, ... of batches."""
    global _part
    previous, _part = _part, _Part(seed, rank, world)
    try:
        yield
    finally:
        _part = previous


def uniform(like: Tensor) -> Tensor:
    """Uniform numbers from 0 to 1, with the shape, type and device of `like`."""
    return _draw(torch.rand, like)


def normal(like: Tensor) -> Tensor:
    """Normal numbers, with the shape, type and device of `like`."""
    return _draw(torch.randn, like)


def common(like: Tensor) -> Tensor:
    """Uniform numbers from 0 to 1 that are the same in every process, for tensors that are not a batch."""
    return _draw(torch.rand, like, rows=False)


def _draw(distribution: Callable[..., Tensor], like: Tensor, rows: bool = True) -> Tensor:
    part, options = _part, {"dtype": like.dtype, "device": like.device}
    if part is None:
        return distribution(like.shape, **options)
    if not rows:
        return distribution(like.shape, generator=part.generator(like.device), **options)
    global_shape = (len(like) * part.world, *like.shape[1:])
    return distribution(global_shape, generator=part.generator(like.device), **options)[part.rank :: part.world]
