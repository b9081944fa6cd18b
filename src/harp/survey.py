"""Looking at a model before any training: how a strategy would spread a budget, and a check-up."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harp import allocate, checkpoint, data, doctor, models
from harp.errors import RecipeError
from harp.units import Weights


def model(
    spec: str,
    data_name: str | None,
    data_dir: Path | None,
    weights: Path | None,
    classes: int | None,
    shape: str | None,
) -> nn.Module:
    """The model that the flags describe."""
    return _subject(spec, data_name, data_dir, weights, classes, shape)[0]


def spread(net: nn.Module, strategy: str, keep: float, *, as_published: bool = False) -> list[dict[str, Any]]:
    """Name, size and kept weights of every layer under a strategy.

    As published, every layer is rounded on its own: those are the integers of the papers' tables, whose sum may miss
    the budget by a few weights. Strategies that pick single weights have nothing to round.
    """
    units = Weights(net)
    total = units.total(keep)
    counts = allocate.allocate(strategy, units, total)
    if as_published and strategy in allocate.WISHES:
        wish = allocate.WISHES[strategy](units, total)
        counts = [round(count) for count in allocate.scale_to(wish, units, total).tolist()]
    rows = zip(units.names, units.sizes, counts, strict=True)
    return [{"name": name, "size": size, "kept": kept} for name, size, kept in rows]


def examination(
    spec: str,
    data_name: str | None,
    data_dir: Path | None,
    weights: Path | None,
    classes: int | None,
    shape: str | None,
) -> doctor.Examination:
    """A check-up on the first test images, or on random ones where there is no data set."""
    net, source, (num_classes, image_shape) = _subject(spec, data_name, data_dir, weights, classes, shape)
    if source is not None:
        images, labels = source.test.images[:64], source.test.labels[:64]
        images = images / 255 if images.dtype == torch.uint8 else images
    else:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(8, *image_shape, generator=generator)
        labels = torch.randint(num_classes, (8,), generator=generator)
    return doctor.examine(net, images, labels)


def _subject(
    spec: str,
    data_name: str | None,
    data_dir: Path | None,
    weights: Path | None,
    classes: int | None,
    shape: str | None,
) -> tuple[nn.Module, data.DataSet | None, tuple[int, tuple[int, int, int]]]:
    source = None if data_name is None else data.load(data_name, data_dir)
    usual_classes, usual_shape = models.usual(spec)
    if source is not None:
        usual_classes, usual_shape = source.num_classes, source.shape
    kind = (classes or usual_classes, usual_shape if shape is None else _parse_shape(shape))
    torch.manual_seed(0)
    net = models.build(spec, num_classes=kind[0], shape=kind[1])
    if weights is not None:
        checkpoint.load_weights(net, weights)
    return net, source, kind


def _parse_shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip())
    if not found:
        raise RecipeError(f"shape {text!r}: write channels x height x width, like 3x32x32")
    channels, height, width = (int(size) for size in found.groups())
    return channels, height, width
