"""How much data a recipe has. Published data sets are in a table, so that their files need not be there."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from harp.data import registry
from harp.data.dataset import DataSet, Split
from harp.data.datasets.base import Encoded, is_streamed
from harp.errors import DataError, RecipeError
from harp.experiments.plan import parse_shape
from harp.experiments.recipe import Recipe


@dataclass(frozen=True)
class Sizes:
    """The numbers of training and test images, their shape (channels, height, width) and their classes."""

    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int
    streamed: bool = False  # read image by image, not held in memory

    def __post_init__(self) -> None:
        if min(self.train, self.test, self.classes, *self.shape) < 1:
            raise RecipeError(
                f"{self.train} training and {self.test} test images of {self.classes} classes and shape {self.shape}: "
                "give numbers above 0"
            )

    def memory(self) -> int:
        """The bytes that a run holds in memory: all images, and a copy of those that it trains on."""
        return 0 if self.streamed else self.decoded() + self.train * math.prod(self.shape)

    def decoded(self) -> int:
        """The bytes of all images."""
        return (self.train + self.test) * math.prod(self.shape)

    def trained(self, recipe: Recipe) -> int:
        """The number of images in an epoch."""
        return recipe.data.train or self.train - recipe.data.held(self.train)

    def noise(self, train: int, test: int) -> DataSet:
        """A data set of noise with images of this shape."""
        generator = torch.Generator().manual_seed(0)

        def split(count: int) -> Split:
            images = torch.randint(256, (count, *self.shape), dtype=torch.uint8, generator=generator)
            return Split(images, torch.randint(self.classes, (count,), generator=generator))

        names = tuple(map(str, range(self.classes)))
        return DataSet("noise", split(train), split(test), names, False, True, "noise", False)

    @classmethod
    def of(cls, recipe: Recipe, data_dir: Path | None) -> Self:
        """The sizes of a recipe's data: from the table, or by counting its files."""
        known, side = registry.facts(recipe.data.name), recipe.data.size
        if known is not None:
            shape = known.shape if side is None else (known.shape[0], side, side)
            return cls(known.train, known.test, shape, known.classes)
        part = recipe.data.model_copy(update={"stream": True}) if _has_files(recipe, data_dir) else recipe.data
        data = part.load(data_dir)  # no image of a folder is decoded
        return cls(len(data.train), len(data.test), data.shape, data.num_classes)


def sizes(
    recipe: Recipe,
    data_dir: Path | None = None,
    *,
    images: str | None = None,
    shape: str | None = None,
    classes: int | None = None,
) -> Sizes:
    """The sizes of a recipe's data. Options override what the table or the files say; all three replace it."""
    if images is not None and shape is not None and classes is not None:
        data = Sizes(1, 1, (1, 1, 1), classes)
    else:
        data = Sizes.of(recipe, data_dir)
    if images is not None:
        if not re.fullmatch(r"\d+(,\d+)?", images):
            raise RecipeError(f"--images {images!r}: write it like 1281167 or 1281167,50000")
        train, _, test = images.partition(",")
        data = replace(data, train=int(train), test=int(test) if test else max(1, int(train) // 10))
    if shape is not None:
        data = replace(data, shape=parse_shape(shape))
    if classes is not None:
        data = replace(data, classes=classes)
    if not 1 <= recipe.data.held(data.train) < data.train:
        raise RecipeError(f"data.holdout is {recipe.data.holdout:g} of {data.train:,} images: nothing is left to train")
    streamed = _has_files(recipe, data_dir) and is_streamed(data.decoded(), recipe.data.stream, recipe.data.test_margin)
    return replace(data, streamed=streamed)


def _has_files(recipe: Recipe, data_dir: Path | None) -> bool:
    """Whether the images are files, which can be streamed; data that is not there is taken for arrays."""
    try:
        return isinstance(registry.find(recipe.data.name, data_dir).source, Encoded)
    except DataError:
        return False
