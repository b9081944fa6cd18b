"""Augmentation: random numbers for each image of a batch, and the image that they give."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harp.data.formats.bounded import Array, Bytes
from harp.data.formats.images import crop_resized
from harp.errors import RecipeError

_TRIES = 10  # random crops of an image until one fits


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
        """Augment each image of a batch by its own random numbers."""
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
    """The usual augmentation of ImageNet: a random crop of the stored image at the wanted size, and a random mirror.

    `area` limits the crop's share of the image, `ratio` its width over its height, drawn on a logarithmic scale. A crop
    that doesn't fit is drawn again, up to ten times; then the centre is taken, in the nearest ratio that is allowed. It
    needs images at their stored size, so only streamed images can be augmented by it.
    """

    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise RecipeError(f"crop: area {self.area}, ratio {self.ratio}, expected the least first, areas up to 1")

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers in [0, 1) for each image: one for the mirror, and ten times an area, a ratio, a row and a column."""
        return torch.rand(count, 1 + 4 * _TRIES, dtype=torch.float64, generator=generator)

    def box(self, width: int, height: int, draws: Array) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the crop that these random numbers give."""
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
        """A random crop of a Pillow image at a size, as bytes [3, size, size]."""
        pixels = crop_resized(image, self.box(image.width, image.height, draws), size)
        return pixels[:, :, ::-1] if self.flip and draws[0] < 0.5 else pixels
