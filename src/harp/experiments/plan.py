"""A model before any training: the allocation of a budget to its layers, and checks of the model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp import models
from harp.data import registry
from harp.errors import RecipeError
from harp.evaluation import model_checks
from harp.experiments.image_size import image_size
from harp.models.normalize import constants
from harp.models.weights import load_weights
from harp.pruning import allocation, rounding
from harp.pruning.channels import TARIFFS, Channels
from harp.pruning.units import Units, Weights, exact
from harp.system.notebook import html_table


@dataclass(frozen=True)
class Subject:
    """A model as options describe it; classes and image shape are given, or the data set's, or the usual ones."""

    spec: str
    data_name: str | None = None
    data_dir: Path | None = None
    weights: Path | None = None
    classes: int | None = None
    shape: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model's factory
    size: int | None = None  # of images that are resized
    normalize: str | None = None  # mean and deviation, as `harp.models.normalize.constants` reads them

    def source(self) -> registry.DataSet | None:
        """The data set, if one is named."""
        if self.data_name is None:
            return None
        size = image_size(
            self.data_name, self.data_dir, self.size, self.spec, classes=self.classes, options=self.options
        )
        return registry.load(self.data_name, self.data_dir, size)

    def kind(self, source: registry.DataSet | None) -> tuple[int, tuple[int, int, int]]:
        """The number of classes and the image shape."""
        classes, shape = models.usual(self.spec) if source is None else (source.num_classes, source.shape)
        if source is None and self.size is not None:
            shape = (shape[0], self.size, self.size)
        return self.classes or classes, shape if self.shape is None else parse_shape(self.shape)

    def model(self, source: registry.DataSet | None = None) -> nn.Module:
        """The model, seeded, or with its weights."""
        classes, shape = self.kind(self.source() if source is None else source)
        torch.manual_seed(0)
        normalize = None if self.normalize is None else constants(self.normalize)
        net = models.build(self.spec, num_classes=classes, shape=shape, normalize=normalize, **self.options)
        if self.weights is not None:
            load_weights(net, self.weights)
        return net

    def images(self, source: registry.DataSet | None) -> tuple[Tensor, Tensor]:
        """The first test images, or random ones where there is no data set."""
        if source is not None:
            images, labels = source.test.images[:64], source.test.labels[:64]
            return images / 255 if images.dtype == torch.uint8 else images, labels
        classes, shape = self.kind(source)
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(8, *shape, generator=generator)
        return images, torch.randint(classes, (8,), generator=generator)

    def examination(self, *, channels: bool = True) -> model_checks.Examination:
        """Checks of the model, and perhaps of its channels."""
        source = self.source()
        return model_checks.examine(self.model(source), *self.images(source), channels=channels)

    def units(self, *, channels: bool = False, budget: str | None = None, multiple: int = 1, **limits: Any) -> Units:
        """The weights or the channels of the model; a budget of None is the usual one."""
        source = self.source()
        net, (images, _) = self.model(source), self.images(source)
        options: dict[str, Any] = limits if budget is None else {**limits, "budget": budget}
        if channels:
            return Channels(net, images, multiple=multiple, **options)
        if multiple != 1:
            raise RecipeError(f"multiple {multiple} has no meaning for weights: it is for --channels")
        return Weights(net, example=images, **options)


class Spread(list[dict[str, Any]]):
    """Name, size and kept units of every layer, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        total = {"name": "total", **{key: sum(layer[key] for layer in self) for key in ("size", "kept")}}
        rows = [
            [one["name"], f"{one['size']:,}", f"{one['kept']:,}", f"{one['kept'] / one['size']:.3%}"]
            for one in [*self, total]
        ]
        return html_table("what each layer keeps", ("layer", "size", "kept", "rate"), rows)


def spread(units: Units, strategy: str, keep: float, *, as_published: bool = False) -> Spread:
    """Name, size and kept units of every layer under a strategy.

    `as_published` rounds every layer on its own, as in the papers' tables, whose sum may miss the budget by a few
    weights. Strategies that choose single weights round nothing.
    """
    if as_published and not exact(units):
        raise RecipeError("--as-published is for budgets that count weights, as in the papers' tables")
    total = units.total(keep)
    counts = allocation.allocate(strategy, units, total)
    if as_published and strategy in allocation.PROPORTIONS:
        proportions = allocation.PROPORTIONS[strategy](units, total)
        counts = [round(count) for count in rounding.scale_to(proportions, units, total).tolist()]
    rows = zip(units.names, units.sizes, counts, strict=True)
    return Spread({"name": name, "size": size, "kept": kept} for name, size, kept in rows)


def totals(units: Units, counts: Sequence[int]) -> dict[str, tuple[int, int]]:
    """The cost of a whole model and at these counts, in every unit; that of the budget comes first."""
    costs = {units.noun: (units.size, units.spend(counts))}
    if isinstance(units, Channels):
        costs["channels"] = (sum(units.sizes), sum(counts))
        for budget, (_, words) in TARIFFS.items():
            priced = units.priced(budget)
            costs.setdefault(words, (priced.exact(units.sizes), priced.exact(counts)))
    else:
        costs.setdefault("weights", (sum(units.sizes), sum(counts)))
    return costs


def parse_shape(text: str) -> tuple[int, int, int]:
    """Channels, height and width from text like 3x32x32 or 3,32,32."""
    match = re.fullmatch(r"(\d+)[x,](\d+)[x,](\d+)", text.strip())
    if not match:
        raise RecipeError(f"shape {text!r}: write channels x height x width, like 3x32x32")
    channels, height, width = map(int, match.groups())
    return channels, height, width
