"""Random numbers of a batch whose parts are in several processes: each draws what one process would have drawn.

    with shared(seed, rank=1, world=4):
        uniform(x)      # every fourth row of what `shared(seed, 0, 1)` gives for the whole batch

Outside of `shared` they come from torch's own generator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Part:
    """Which rows of a batch are here, and the generators that all processes have in common."""

    seed: int
    rank: int
    world: int
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def of(self, device: torch.device) -> torch.Generator:
        """The generator of a device, which has to be where its numbers are."""
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


_part: _Part | None = None  # no context variable: `torch.compile` could not see through it


@contextmanager
def shared(seed: int, rank: int = 0, world: int = 1) -> Iterator[None]:
    """For a while, draw from this seed, for the rows `rank`, `rank + world`, ... of batches."""
    global _part
    before, _part = _part, _Part(seed, rank, world)
    try:
        yield
    finally:
        _part = before


def uniform(like: Tensor) -> Tensor:
    """Uniform numbers from 0 to 1, of the shape and on the device of another tensor."""
    return _draw(torch.rand, like)


def normal(like: Tensor) -> Tensor:
    """Normal numbers, of the shape and on the device of another tensor."""
    return _draw(torch.randn, like)


def common(like: Tensor) -> Tensor:
    """Uniform numbers from 0 to 1 that are no rows of a batch: the same in every process."""
    return _draw(torch.rand, like, rows=False)


def _draw(distribution: Callable[..., Tensor], like: Tensor, rows: bool = True) -> Tensor:
    part, kind = _part, {"dtype": like.dtype, "device": like.device}
    if part is None:
        return distribution(like.shape, **kind)
    if not rows:
        return distribution(like.shape, generator=part.of(like.device), **kind)
    whole = (len(like) * part.world, *like.shape[1:])
    return distribution(whole, generator=part.of(like.device), **kind)[part.rank :: part.world]
