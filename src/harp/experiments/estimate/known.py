"""How much data there is: a recipe can be estimated before its data set is here."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from harp.data import registry
from harp.data.dataset import DataSet, Split
from harp.data.datasets.base import Encoded, is_streamed
from harp.errors import RecipeError
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
            raise RecipeError(f"{self.train} + {self.test} images of {self.classes} classes and shape {self.shape}")

    def memory(self) -> int:
        """The bytes that a run holds of it: the images, and those that it trains on once more."""
        return 0 if self.streamed else self.decoded() + self.train * math.prod(self.shape)

    def decoded(self) -> int:
        """The bytes of all images."""
        return (self.train + self.test) * math.prod(self.shape)

    def held(self, recipe: Recipe) -> int:
        """How many images a recipe holds out of training."""
        return recipe.data.held(self.train)

    def trained(self, recipe: Recipe) -> int:
        """How many images an epoch has."""
        return recipe.data.train or self.train - self.held(recipe)

    def noise(self, train: int, test: int) -> DataSet:
        """So many images of noise of this kind."""
        generator = torch.Generator().manual_seed(0)

        def split(count: int) -> Split:
            images = torch.randint(256, (count, *self.shape), dtype=torch.uint8, generator=generator)
            return Split(images, torch.randint(self.classes, (count,), generator=generator))

        names = tuple(map(str, range(self.classes)))
        return DataSet("noise", split(train), split(test), names, False, True, "noise", False)

    @classmethod
    def of(cls, recipe: Recipe, data_dir: Path | None) -> Self:
        """Those of a recipe's data: by the table where they are known, else by reading it."""
        known, side = registry.facts(recipe.data.name), recipe.data.size
        if known is not None:
            shape = known.shape if side is None else (known.shape[0], side, side)
            return cls(known.train, known.test, shape, known.classes)
        how = recipe.data.loading() | ({"stream": True} if _of_files(recipe) else {})  # they are counted, not decoded
        found = registry.load(recipe.data.name, data_dir, **how)
        return cls(len(found.train), len(found.test), found.shape, found.num_classes)


def sizes(
    recipe: Recipe,
    data_dir: Path | None = None,
    *,
    images: str | None = None,
    shape: str | None = None,
    classes: int | None = None,
) -> Sizes:
    """How much data a recipe has: what is given as flags, else what is known of it or found in its files."""
    if images is not None and shape is not None and classes is not None:
        base = Sizes(1, 1, (1, 1, 1), 1)
    else:
        base = Sizes.of(recipe, data_dir)
    if images is not None:
        numbers = _numbers("--images", images, "1281167 or 1281167,50000")
        base = replace(base, train=numbers[0], test=numbers[1] if len(numbers) > 1 else max(1, numbers[0] // 10))
    if shape is not None:
        sides = _numbers("--shape", shape, "3,224,224")
        if len(sides) != 3:
            raise RecipeError(f"--shape {shape!r}: write channels, height and width, like 3,224,224")
        base = replace(base, shape=(sides[0], sides[1], sides[2]))
    made = base if classes is None else replace(base, classes=classes)
    wishes = recipe.data.loading()
    streamed = _of_files(recipe) and is_streamed(made.decoded(), wishes["stream"], wishes["margin"])
    if not 1 <= made.held(recipe) < made.train:
        raise RecipeError(f"data.holdout is {recipe.data.holdout:g} of {made.train:,} images: nothing is left to train")
    return replace(made, streamed=streamed)


def _of_files(recipe: Recipe) -> bool:
    """Whether the images are files, which may be streamed."""
    return isinstance(registry.DATASETS.get(recipe.data.name), Encoded)


def _numbers(flag: str, text: str, like: str) -> list[int]:
    if not re.fullmatch(r"\d+([,x]\d+)*", text):
        raise RecipeError(f"{flag} {text!r}: write it like {like}")
    return [int(number) for number in re.split("[,x]", text)]
