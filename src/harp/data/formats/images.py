"""Encoded images, decoded with Pillow: upright, in RGB, cut and resized to a square."""

import importlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from harp.data.formats.bounded import Bytes, first_line
from harp.errors import DataError, MissingExtra

LARGEST_SIDE = 4096
"""Pixels of the largest square that images are resized to."""


def pillow() -> Any:
    """Pillow's module of images; by name, so that the library imports, and type checks, without it."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        message = 'image files need Pillow, which is not installed: pip install "harp-prune[images]"'
        raise MissingExtra(message) from error


@contextmanager
def careful() -> Iterator[None]:
    """Decode in here: a picture so large that Pillow warns is as wrong as a damaged one, other warnings are noise.

    Filters belong to the process: enter it in one thread, around all that others decode meanwhile.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        yield


def upright(data: bytes, name: str) -> Any:
    """A Pillow image in RGB, the way up that its EXIF orientation says."""
    image_file = pillow()
    turned = importlib.import_module("PIL.ImageOps").exif_transpose
    try:
        with image_file.open(io.BytesIO(data)) as image:
            image.load()
            return _rgb(turned(image))
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged bytes
        raise DataError(f"{name}: can't be decoded ({_reason(error, data)}), expected an image") from error


def _reason(error: Exception, data: bytes) -> str:
    """Why, in words that are the same each time: Pillow names what it can't identify by its address in memory."""
    if not data:
        return "it is empty"
    unknown = type(error).__name__ == "UnidentifiedImageError"
    return "no format that is known" if unknown else first_line(error)[:120]


def _rgb(image: Any) -> Any:
    """Eight bits a channel: Pillow would clip 16 bits, and warn of a palette that has transparent colours."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        high = float(values.max(initial=0))
        if image.mode == "F" or values.min(initial=0) < 0 or high > 0xFFFF:
            raise ValueError(f"pixels of kind {image.mode} up to {high:g}, expected 8 or 16 bits")
        # 16 bits of grey come as I;16, and from some formats as I: the upper byte is the 8-bit picture.
        eight = values >> 8 if image.mode != "I" or high > 0xFF else values
        image = pillow().fromarray(eight.astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


@dataclass(frozen=True)
class Centre:
    """The centre of an image as a square of `size` pixels.

    The shorter side is resized to `margin` times the size: with 1 all of it is kept, with 256/224 a rim is cut off, as
    ImageNet networks are usually tested.
    """

    size: int
    margin: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST_SIDE:
            raise DataError(f"image size {self.size}, expected 1 to {LARGEST_SIDE} pixels")
        if not 1 <= self.margin <= 4:
            raise DataError(f"margin {self.margin:g}, expected 1 to 4 times the image size")

    def __call__(self, image: Any) -> Bytes:
        """The square, planes first."""
        return planes(self._whole(image) if self.margin == 1 else self._inner(image))

    def _whole(self, image: Any) -> Any:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return cut(image, (left, top, left + side, top + side), self.size)

    def _inner(self, image: Any) -> Any:
        shorter = round(self.size * self.margin)
        width, height = (max(shorter, shorter * side // min(image.size)) for side in image.size)
        large = image.resize((width, height), pillow().Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return large.crop((left, top, left + self.size, top + self.size))


def cut(image: Any, box: tuple[int, int, int, int], size: int) -> Any:
    """A part of an image (left, top, right, bottom) at a size; bilinear, with antialiasing where it gets smaller."""
    part = image.crop(box)
    return part if part.size == (size, size) else part.resize((size, size), pillow().Resampling.BILINEAR)


def planes(image: Any) -> Bytes:
    """The pixels as bytes [3, height, width]."""
    return np.asarray(image, np.uint8).transpose(2, 0, 1)
