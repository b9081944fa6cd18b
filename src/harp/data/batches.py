"""The batches of an epoch, and their augmentation.

    batches = Batches(data.train, 128, seed=0, augment=Augment(flip=data.flip))
    for x, y in batches(epoch=0): ...             # float32 in [0, 1], int64

Every random choice is a pure function of a seed, the epoch, the index of the batch and the position in it: a run that
was stopped in the middle of an epoch continues with the same images, with any number of processes and workers.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from harp.data import Split
from harp.errors import DataError, RecipeError
from harp.seeds import derive
from harp.streaming.augment import Augment, ResizedCrop
from harp.streaming.corrupt import Corrupt
from harp.streaming.loading import Decoding, Job, Loading, check_workers
from harp.streaming.streamed import Streamed

__all__ = ["Augment", "Batches", "ResizedCrop"]


class _Plan(NamedTuple):
    """One process's part of a global batch: which images, and what was drawn for each."""

    images: Tensor
    draws: Tensor | None


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of an epoch, a pure function of (seed, epoch, index): skipping the first k costs nothing.

    `batch` is the global batch. With `world` processes each gets an interleaved part of every global batch,
    whose order and augmentation don't depend on `world`; a last batch that doesn't divide is trimmed to equal
    parts. Streamed images are decoded ahead by `workers` processes, which changes nothing but the speed; in the place
    of one that can't be decoded comes the next of the split that can, and `corrupt` is told of it.
    """

    split: Split
    batch: int
    _: KW_ONLY
    seed: int = 0
    augment: Augment | ResizedCrop | None = None
    shuffle: bool = True
    rank: int = 0
    world: int = 1
    workers: int = 0
    corrupt: Corrupt | None = None

    def __post_init__(self) -> None:
        batch, rank, world = self.batch, self.rank, self.world
        if batch < 1 or world < 1 or batch % world:
            raise RecipeError(f"batch {batch} for {world} processes, expected a positive multiple of {world}")
        if not 0 <= rank < world:
            raise RecipeError(f"rank {rank} of {world} processes, expected 0 to {world - 1}")
        check_workers(self.workers)
        if len(self.split) < world:
            raise DataError(f"{len(self.split)} images for {world} processes, expected at least one each")
        if isinstance(self.augment, ResizedCrop) and not isinstance(self.split.images, Streamed):
            raise RecipeError("crops of the stored pictures need streamed images: these are in memory, at their size")

    def __len__(self) -> int:
        whole, rest = divmod(len(self.split), self.batch)
        return whole + (rest >= self.world)

    def __call__(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from `start` on: x float32 in [0, 1] and y int64."""
        plans = self._plans(epoch, start)
        found = self._streamed(plans) if isinstance(self.split.images, Streamed) else map(self._in_memory, plans)
        for images, labels in found:
            yield (images.float().div_(255) if images.dtype == torch.uint8 else images), labels

    def _plans(self, epoch: int, start: int) -> Iterator[_Plan]:
        order = self._order(epoch)
        for index in range(start, len(self)):
            chosen = order[index * self.batch : (index + 1) * self.batch]
            mine = slice(self.rank, len(chosen) - len(chosen) % self.world, self.world)
            draws = None
            if self.augment is not None:
                generator = torch.Generator().manual_seed(derive(self.seed, "augment", epoch, index))
                # Draws for the whole global batch, of which ours are a part.
                draws = self.augment.draw(len(chosen), generator)[mine]
            yield _Plan(chosen[mine], draws)

    def _in_memory(self, plan: _Plan) -> tuple[Tensor, Tensor]:
        part = self.split.select(plan.images)
        if isinstance(self.augment, Augment) and plan.draws is not None:
            return self.augment.apply(part.images, plan.draws), part.labels
        return part.images, part.labels

    def _streamed(self, plans: Iterator[_Plan]) -> Iterator[tuple[Tensor, Tensor]]:
        sent = deque[_Plan]()

        def jobs() -> Iterator[Job]:
            for plan in plans:
                sent.append(plan)
                yield self._job(plan.images, plan.draws)

        for images, failures in self._loading(jobs()):
            plan = sent.popleft()
            chosen = plan.images.clone()
            for row, reason in failures.items():
                self._undecodable.tell(reason)
                draws = None if plan.draws is None else plan.draws[row : row + 1]
                images[row], chosen[row] = self._next_readable(int(chosen[row]), draws)
            yield images, self.split.labels[chosen]

    def _job(self, chosen: Tensor, draws: Tensor | None) -> Job:
        images = self.split.images
        assert isinstance(images, Streamed)
        return Job(images.places(chosen), None if draws is None else draws.numpy())

    def _next_readable(self, index: int, draws: Tensor | None) -> tuple[Tensor, int]:
        """The first image after `index` that can be decoded, and where it is in the split."""
        for step in range(1, len(self.split)):
            other = (index + step) % len(self.split)
            images, failures = self._loading.task[self._job(torch.tensor([other]), draws)]
            if not failures:
                return images[0], other
            self._undecodable.tell(failures[0])
        raise DataError(f"none of {len(self.split):,} images can be decoded, expected images")

    @cached_property
    def _undecodable(self) -> Corrupt:
        return self.corrupt if self.corrupt is not None else Corrupt(len(self.split))

    @cached_property
    def _loading(self) -> Loading:
        images = self.split.images
        assert isinstance(images, Streamed)
        return Loading(Decoding(images.look, self.augment), self.workers)

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.split))
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        return torch.randperm(len(self.split), generator=generator)

    def shard(self, rank: int, world: int) -> "Batches":
        """The part of process `rank` of `world`, of the whole batch whichever part this is."""
        return replace(self, rank=rank, world=world)
