"""The side of the images that a model is made for, where it says so or works with one only."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from harp.errors import HarpError
from harp.models import external
from harp.models.modes import evaluating

TRIED = (8, 16, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512)
"""Sizes that a network of a user is tried with. A network that works with two of them takes any size."""

_CHANNELS = 3
_FULL = 3  # dimensions of the shape of an image

Shape = tuple[int, int, int]


def of_torchvision(name: str) -> int | None:
    """The crop of the preprocessing that torchvision has for its weights."""
    library = external.import_torchvision().models
    try:
        weights = library.get_model_weights(name).DEFAULT
        return int(weights.transforms().crop_size[0])
    except Exception:  # a model without weights, or an unknown one, which fails when it is built
        return None


def of_timm(name: str, options: Mapping[str, Any]) -> int | None:
    """The input size in timm's configuration of a model, or the one that its options ask for."""
    external.import_torchvision()
    try:
        import timm

        config = timm.get_pretrained_cfg(name)
    except Exception:  # timm is missing, or the name is unknown: building the model says so
        return None
    given = options.get("img_size")
    return given if isinstance(given, int) else _square(getattr(config, "input_size", None))


def of_module(build: Callable[[Shape], nn.Module]) -> int | None:
    """The size that a network says by `default_cfg`, as those of timm do, or the only one of `TRIED` that it takes.

    `build` makes the network for an image shape.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            network, other = (build((_CHANNELS, size, size)) for size in (TRIED[-1], TRIED[0]))
        except HarpError:
            return None  # building it for the data says why
        config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None)
        said = _square(config.get("input_size")) if isinstance(config, Mapping) else None
        if said is not None:
            return said
        if [tensor.shape for tensor in network.parameters()] != [tensor.shape for tensor in other.parameters()]:
            return None  # it is built for any size
        works: list[int] = []
        with evaluating(network):
            for size in TRIED:
                try:
                    network(torch.zeros(2, _CHANNELS, size, size))
                except Exception:  # a network of a user may raise anything for images of another size
                    continue
                works.append(size)
                if len(works) > 1:
                    return None
    return works[0] if works else None


def _square(shape: Any) -> int | None:
    """The side in a shape (channels, height, width), if the image is a square."""
    if isinstance(shape, (tuple, list)) and len(shape) == _FULL and shape[1] == shape[2]:
        return int(shape[1])
    return None
