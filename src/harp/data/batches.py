"""The batches of an epoch, and their augmentation.

    batches = Batches(data.train, 128, seed=0, augment=Augment(flip=data.flip))
    for x, y in batches(epoch=0): ...             # float32 in [0, 1], int64

Every random choice depends only on the seed, the epoch, the index of the batch and the position in it. So a run that
was stopped in the middle of an epoch continues with the same images, with any number of processes and workers.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import tee
from typing import NamedTuple

import torch
from torch import Tensor

from harp.data.dataset import Split
from harp.data.decodable import Corrupt
from harp.data.streaming.augment import Augment, ResizedCrop
from harp.data.streaming.images import Streamed
from harp.data.streaming.workers import Decoder, Job, Loader
from harp.errors import DataError, RecipeError
from harp.system.numbers import brief
from harp.system.seeds import derive

__all__ = ["Augment", "Batches", "ResizedCrop"]


class _Plan(NamedTuple):
    """The part of a global batch that this process has: indices of images, and random numbers to augment each."""

    indices: Tensor
    draws: Tensor | None


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of an epoch. Each depends only on (seed, epoch, index), so the first k can be skipped at no cost.

    `batch` is the size of the global batch. With `world` processes each gets an interleaved part of every global batch;
    the order and the augmentation don't depend on `world`. A last batch that can't be divided evenly is trimmed.
    Streamed images are decoded ahead by `workers` processes, which affects only the speed. An image that can't be
    decoded is replaced by the next readable one of the split, and reported to `corrupt`.

    Arguments:
        split: images and labels.
        batch: the number of images of all processes together.
        seed: the seed of the order and of the augmentation.
        augment: the augmentation of each image, such as `harp.Augment()`.
        shuffle: use a different order in each epoch.
        rank, world: the rank of this process, and the number of processes.
        workers: the number of processes that decode streamed images; 0: decode in this process.
        corrupt: counts the images that can't be decoded.

    Example:
        batches = harp.Batches(split, 64, seed=0, augment=harp.Augment())
        for x, y in batches(0):
            print(x.shape, y.shape)
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
        split: object = self.split
        if not isinstance(split, Split):
            advice = "give one split of a data set, like data.train, or pass a DataLoader of yours to harp.fit itself"
            raise DataError(f"batches of {brief(split)}: {advice}")
        if not all(isinstance(value, int) for value in (batch, rank, world, self.workers)):
            raise RecipeError(f"batch {brief(batch)}: give the number of images, like 64")
        if not isinstance(self.augment, Augment | ResizedCrop | None):
            raise RecipeError(
                f"augment {brief(self.augment)}: give harp.Augment(flip=True), or None for no augmentation"
            )
        if batch < 1 or world < 1 or batch % world:
            raise RecipeError(f"batch {batch} for {world} processes, expected a positive multiple of {world}")
        if not 0 <= rank < world:
            raise RecipeError(f"rank {rank} of {world} processes, expected 0 to {world - 1}")
        if self.workers < 0:
            raise RecipeError(f"workers {self.workers}, expected 0 or more")
        if len(self.split) < world:
            raise DataError(f"{len(self.split)} images for {world} processes, expected at least one each")
        if isinstance(self.augment, ResizedCrop) and not isinstance(self.split.images, Streamed):
            raise RecipeError("crops of the stored images need streamed images: these are in memory, at their size")

    def __repr__(self) -> str:
        return f"Batches({len(self)} batches of {self.batch} of {self.split!r})"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        raise RecipeError("batches depend on the epoch: write `for x, y in batches(epoch)`")

    def __len__(self) -> int:
        whole, rest = divmod(len(self.split), self.batch)
        return whole + (rest >= self.world)

    def __call__(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from `start` on: x float32 in [0, 1] and y int64."""
        plans = self._plans(epoch, start)
        stored = self.split.images
        batches = self._streamed(stored, plans) if isinstance(stored, Streamed) else map(self._in_memory, plans)
        for images, labels in batches:
            yield (images.float().div_(255) if images.dtype == torch.uint8 else images), labels

    def _plans(self, epoch: int, start: int) -> Iterator[_Plan]:
        order = self._order(epoch)
        for index in range(start, len(self)):
            chosen = order[index * self.batch : (index + 1) * self.batch]
            own = slice(self.rank, len(chosen) - len(chosen) % self.world, self.world)
            draws = None
            if self.augment is not None:
                generator = torch.Generator().manual_seed(derive(self.seed, "augment", epoch, index))
                # Drawn for the global batch, so that the numbers don't depend on `world`.
                draws = self.augment.draw(len(chosen), generator)[own]
            yield _Plan(chosen[own], draws)

    def _in_memory(self, plan: _Plan) -> tuple[Tensor, Tensor]:
        part = self.split.select(plan.indices)
        if isinstance(self.augment, Augment) and plan.draws is not None:
            return self.augment.apply(part.images, plan.draws), part.labels
        return part.images, part.labels

    def _streamed(self, images: Streamed, plans: Iterator[_Plan]) -> Iterator[tuple[Tensor, Tensor]]:
        plans, ahead = tee(plans)  # jobs are taken ahead of their results
        results = self._loader(_job(images, plan.indices, plan.draws) for plan in ahead)
        for plan, (decoded, failures) in zip(plans, results, strict=True):
            indices = plan.indices.clone()
            for row, reason in failures.items():
                self._undecodable.add(reason)
                draws = None if plan.draws is None else plan.draws[row : row + 1]
                decoded[row], indices[row] = self._next_readable(images, int(indices[row]), draws)
            yield decoded, self.split.labels[indices]

    def _next_readable(self, images: Streamed, index: int, draws: Tensor | None) -> tuple[Tensor, int]:
        """The first image after `index` that can be decoded, and its index in the split."""
        for step in range(1, len(self.split)):
            other = (index + step) % len(self.split)
            decoded, failures = self._loader.decoder[_job(images, torch.tensor([other]), draws)]
            if not failures:
                return decoded[0], other
            self._undecodable.add(failures[0])
        raise DataError(f"none of {len(self.split):,} images can be decoded, expected images")

    @cached_property
    def _undecodable(self) -> Corrupt:
        return self.corrupt if self.corrupt is not None else Corrupt(len(self.split))

    @cached_property
    def _loader(self) -> Loader:
        assert isinstance(self.split.images, Streamed)
        return Loader(Decoder(self.split.images.crop, self.augment), self.workers)

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.split))
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        return torch.randperm(len(self.split), generator=generator)

    def shard(self, rank: int, world: int) -> "Batches":
        """The part of process `rank` of `world` of the global batches."""
        return replace(self, rank=rank, world=world)


def _job(images: Streamed, indices: Tensor, draws: Tensor | None) -> Job:
    return Job(images.places(indices), None if draws is None else draws.numpy())
