"""Encoded images, decoded with Pillow: upright, in RGB, cropped and resized to a square."""

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
"""The side of the largest square that images are resized to, in pixels."""


def pillow() -> Any:
    """Pillow's module of images; imported by name, so that the library works, and type checks, without it."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        message = 'image files need Pillow, which is not installed: pip install "harp-prune[images]"'
        raise MissingExtra(message) from error


@contextmanager
def strict_warnings() -> Iterator[None]:
    """A context to decode in: Pillow's warning of a huge image is an error, its other warnings are ignored.

    Warning filters belong to the process: enter this in one thread, around everything that other threads decode.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        yield


def decode_image(data: bytes, name: str) -> Any:
    """A Pillow image in RGB, turned as its EXIF orientation says."""
    image_module = pillow()
    turn = importlib.import_module("PIL.ImageOps").exif_transpose
    try:
        with image_module.open(io.BytesIO(data)) as image:
            image.load()
            return _rgb(turn(image))
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged bytes
        reason = first_line(error)[:120]
        if not data:
            reason = "it is empty"
        elif type(error).__name__ == "UnidentifiedImageError":
            reason = "no format that is known"  # Pillow's message has an address in memory, which changes each time
        raise DataError(f"{name}: can't be decoded ({reason}), expected an image") from error


def _rgb(image: Any) -> Any:
    """Eight bits a channel: Pillow would clip 16 bits, and warn of a palette that has transparent colours."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        high = float(values.max(initial=0))
        if image.mode == "F" or values.min(initial=0) < 0 or high > 0xFFFF:
            raise ValueError(f"pixels of mode {image.mode} up to {high:g}, expected 8 or 16 bits")
        # 16 bits of grey have the mode I;16, and in some formats I: the upper byte is the 8-bit image.
        eight = values >> 8 if image.mode != "I" or high > 0xFF else values
        image = pillow().fromarray(eight.astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


@dataclass(frozen=True)
class Centre:
    """The centre of an image as a square of `size` pixels.

    The shorter side is resized to `margin` times the size: 1 keeps all of it, 256/224 cuts off a margin, as is usual in
    tests of ImageNet networks.
    """

    size: int
    margin: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST_SIDE:
            raise DataError(f"image size {self.size}, expected 1 to {LARGEST_SIDE} pixels")
        if not 1 <= self.margin <= 4:
            raise DataError(f"margin {self.margin:g}, expected 1 to 4 times the image size")

    def __call__(self, image: Any) -> Bytes:
        """The pixels of the square as bytes [3, size, size]."""
        if self.margin == 1:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            return crop_resized(image, (left, top, left + side, top + side), self.size)
        shorter = round(self.size * self.margin)
        width, height = (max(shorter, shorter * side // min(image.size)) for side in image.size)
        large = image.resize((width, height), pillow().Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return crop_resized(large, (left, top, left + self.size, top + self.size), self.size)


def crop_resized(image: Any, box: tuple[int, int, int, int], size: int) -> Bytes:
    """A part of an image (left, top, right, bottom) resized to a square, as bytes [3, size, size].

    Bilinear, with antialiasing where the image gets smaller.
    """
    part = image.crop(box)
    if part.size != (size, size):
        part = part.resize((size, size), pillow().Resampling.BILINEAR)
    return np.asarray(part, np.uint8).transpose(2, 0, 1)
