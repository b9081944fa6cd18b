"""Augmentation: what is drawn for each image of a batch, and what is made of the image by it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harp.data.formats import Array, Bytes, cut, planes
from harp.errors import RecipeError


@dataclass(frozen=True)
class Augment:
    """The usual augmentation of small images: a random crop after zero padding, and a random mirror image.

    Arguments:
        pad: pixels of zeros around an image before it is cropped to its size.
        flip: mirror half of the images.

    Example:
        batches = harp.Batches(split, 64, augment=harp.Augment(pad=2, flip=False))
    """

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


@dataclass(frozen=True)
class ResizedCrop:
    """The usual augmentation of ImageNet: a random part of the picture at the wanted size, and a random mirror image.

    The part's area is a share of the picture's, its width over its height is a ratio drawn on a logarithmic scale. A
    part that doesn't fit is drawn anew, ten times; then the centre is taken, in the nearest ratio that is allowed. It
    works on pictures as they were stored, so only streamed images can be augmented by it.
    """

    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise RecipeError(f"crop: area {self.area}, ratio {self.ratio}, expected the least first, areas up to 1")

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers in [0, 1) for each image: a mirror, and ten times an area, a ratio, a row and a column."""
        return torch.rand(count, 1 + 4 * _TRIES, dtype=torch.float64, generator=generator)

    def box(self, width: int, height: int, draws: Array) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the part that is drawn of a picture."""
        low, high = (math.log(bound) for bound in self.ratio)
        for share, shape, row, column in draws[1:].reshape(_TRIES, 4).tolist():
            area = width * height * (self.area[0] + share * (self.area[1] - self.area[0]))
            ratio = math.exp(low + shape * (high - low))
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                left, top = int(column * (width - wide + 1)), int(row * (height - tall + 1))
                return left, top, left + wide, top + tall
        wide = min(width, max(1, round(height * self.ratio[1])))
        tall = min(height, max(1, round(width / self.ratio[0])))
        left, top = (width - wide) // 2, (height - tall) // 2
        return left, top, left + wide, top + tall

    def __call__(self, image: Any, size: int, draws: Array) -> Bytes:
        """The part of a Pillow image that is drawn, at a size, planes first."""
        found = planes(cut(image, self.box(image.width, image.height, draws), size))
        return found[:, :, ::-1] if self.flip and draws[0] < 0.5 else found


_TRIES = 10
