"""The batches of an epoch, and their augmentation.

    batches = Batches(data.train, 128, seed=0, augment=Augment(flip=data.flip))
    for x, y in batches(epoch=0): ...             # float32 in [0, 1], int64

Every random choice is a pure function of a seed, the epoch and the index of the batch: a run that was stopped in the
middle of an epoch continues with the same images.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from harp.data import Split
from harp.errors import DataError, RecipeError
from harp.seeds import derive


@dataclass(frozen=True)
class Augment:
    """The usual augmentation of small images: a random crop after zero padding, and a random mirror image."""

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise RecipeError(f"augment: pad {self.pad}, expected 0 or more pixels")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment each image of a batch by its own draw."""
        return self.apply(images, self.draw(len(images), generator))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """For each image the row and column where its crop starts, and whether it is mirrored."""
        # Always three draws, so that crops are the same with and without mirroring.
        span = torch.tensor([2 * self.pad + 1, 2 * self.pad + 1, 2])
        # 2**30 is so far beyond the span that the remainder is uniform for all practical purposes.
        return torch.randint(1 << 30, (count, 3), generator=generator) % span

    def apply(self, images: Tensor, moves: Tensor) -> Tensor:
        """Crop and mirror image i by `moves[i]`, all in one gather."""
        count, channels, height, width = images.shape
        moves = moves.to(images.device)
        rows = moves[:, 0, None] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).expand(count, width)
        if self.flip:
            columns = torch.where(moves[:, 2, None] == 1, width - 1 - columns, columns)
        columns = columns + moves[:, 1, None]
        cells = (rows[:, :, None] * (width + 2 * self.pad) + columns[:, None, :]).reshape(count, 1, -1)
        padded = F.pad(images, (self.pad,) * 4).flatten(2)
        return padded.gather(2, cells.expand(count, channels, -1)).view(images.shape)


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of an epoch, a pure function of (seed, epoch, index): skipping the first k costs nothing.

    `batch` is the global batch. With `world` processes each gets an interleaved part of every global batch,
    whose order and augmentation don't depend on `world`; a last batch that doesn't divide is trimmed to equal
    parts.
    """

    split: Split
    batch: int
    _: KW_ONLY
    seed: int = 0
    augment: Augment | None = None
    shuffle: bool = True
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        batch, rank, world = self.batch, self.rank, self.world
        if batch < 1 or world < 1 or batch % world:
            raise RecipeError(f"batch {batch} for {world} processes, expected a positive multiple of {world}")
        if not 0 <= rank < world:
            raise RecipeError(f"rank {rank} of {world} processes, expected 0 to {world - 1}")
        if len(self.split) < world:
            raise DataError(f"{len(self.split)} images for {world} processes, expected at least one each")

    def __len__(self) -> int:
        whole, rest = divmod(len(self.split), self.batch)
        return whole + (rest >= self.world)

    def __call__(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from `start` on: x float32 in [0, 1] and y int64."""
        order = self._order(epoch)
        for index in range(start, len(self)):
            chosen = order[index * self.batch : (index + 1) * self.batch]
            mine = slice(self.rank, len(chosen) - len(chosen) % self.world, self.world)
            part = self.split.select(chosen[mine])
            images = part.images
            if self.augment is not None:
                generator = torch.Generator().manual_seed(derive(self.seed, "augment", epoch, index))
                # Draws for the whole global batch, applied to our part of it.
                images = self.augment.apply(images, self.augment.draw(len(chosen), generator)[mine])
            yield (images.float().div_(255) if images.dtype == torch.uint8 else images), part.labels

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.split))
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        return torch.randperm(len(self.split), generator=generator)

    def shard(self, rank: int, world: int) -> "Batches":
        """The part of process `rank` of `world`, of the whole batch whichever part this is."""
        return replace(self, rank=rank, world=world)
