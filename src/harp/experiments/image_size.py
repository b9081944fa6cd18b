"""The size to which the images of a user are resized for a model."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harp import models
from harp.data import registry
from harp.errors import DataError

logger = logging.getLogger("harp")


def image_size(
    data: str,
    data_dir: Path | None,
    given: int | None,
    model: str,
    *,
    classes: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> int | None:
    """The given size, or else the one that the model is made for; None for data whose images have a size of their own.

    Raises `DataError` with a question if nothing says it.
    """
    place = registry.find(data, data_dir)
    if given is not None or not place.resizes:
        return given
    size = models.expected_size(model, classes or models.usual(model)[0], options or {})
    if size is None:
        width, height = place.first_size()
        question = f"which size should the images of {data} have? {Path(model).name} does not say it"
        raise DataError(
            f"{question}: add --size, like --size {min(width, height)} (the first image has {width}x{height})"
        )
    name = Path(model).name
    logger.info("%s: images of %dx%d pixels, as %s takes them; --size says another size", data, size, size, name)
    return size
