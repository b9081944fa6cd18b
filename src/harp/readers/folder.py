"""Folders of images: one folder a class, and the layout of Tiny-ImageNet."""

import importlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harp.errors import DataError, MissingExtra
from harp.readers.payload import Bytes, Integers, first_line

_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"))


class ImageFolder(NamedTuple):
    """What `read_image_folder` found: uint8 images [N, 3, size, size], labels that index `classes`."""

    train_images: Bytes
    train_labels: Integers
    test_images: Bytes
    test_labels: Integers
    classes: tuple[str, ...]


def read_image_folder(root: str | Path, size: int) -> ImageFolder:
    """Read train/<class>/ and test/<class>/ (or val/<class>/), decoded with Pillow to RGB.

    The shorter side is resized to `size` and the centre is kept. Everything is held in memory: 3 * size**2
    bytes an image, so 100,000 images take 1.2 GB at 64x64 and 15 GB at 224x224; more than the machine has is
    refused before the first image is decoded. Files below a class folder count as well
    (train/<class>/images/), and so does the published layout of Tiny-ImageNet, val/images with
    val/val_annotations.txt.
    """
    root = Path(root)
    if not 1 <= size <= 4096:
        raise DataError(f"image size {size}, expected 1 to 4096 pixels")
    held = next((part for part in ("test", "val") if (root / part).is_dir()), None)
    if held is None or not (root / "train").is_dir():
        raise DataError(f"{root}: expected the folders train and test (or val), each with one folder a class")
    try:
        train = _files_by_class(root / "train")
        annotations = root / held / "val_annotations.txt"
        test = _annotated_files(annotations) if annotations.is_file() else _files_by_class(root / held)
    except OSError as error:
        raise DataError(f"{root}: can't be listed ({first_line(error)}), expected readable folders") from error
    classes = tuple(sorted(train))
    if unknown := sorted(set(test) - set(classes)):
        raise DataError(f"{root / held}: class {unknown[0]} is not in train, expected the classes of train")
    _check_memory(root, size, sum(map(len, train.values())) + sum(map(len, test.values())))
    return ImageFolder(*_decode(train, classes, size), *_decode(test, classes, size), classes)


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    """The image files below each class folder, in the order of their names."""
    found: dict[str, list[Path]] = {}
    for group in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        files = (path for path in group.rglob("*") if path.suffix.lower() in _SUFFIXES)
        found[group.name] = sorted(path for path in files if path.is_file() and not path.name.startswith("."))
        if not found[group.name]:
            raise DataError(f"{group}: no images, expected files such as .png or .jpg")
    if not found:
        raise DataError(f"{folder}: no class folders, expected one folder of images a class")
    return found


def _annotated_files(annotations: Path) -> dict[str, list[Path]]:
    """The files in Tiny-ImageNet's val_annotations.txt: a line starts with a file name and its class."""
    found: dict[str, list[Path]] = {}
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or Path(fields[0]).name != fields[0]:
            raise DataError(f"{annotations}: line {number} is {line[:60]!r}, expected a file name, a tab and a class")
        found.setdefault(fields[1], []).append(annotations.parent / "images" / fields[0])
    if not found:
        raise DataError(f"{annotations}: empty, expected a line for each image")
    return found


def _check_memory(root: Path, size: int, count: int) -> None:
    """Refuse what can't fit: an allocation beyond the memory often succeeds, and kills the process later."""
    needed = 3 * size * size * count
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        have = f"{memory / 1e9:.1f} GB"
        raise DataError(
            f"{root}: {count:,} images at size {size} need {needed / 1e9:.1f} GB, expected less than {have}"
        )


def _decode(files: dict[str, list[Path]], classes: Sequence[str], size: int) -> tuple[Bytes, Integers]:
    """Decode the files of every class into one array."""
    try:
        # By name, so that the library imports, and type checks, without the optional dependency.
        pillow = importlib.import_module("PIL.Image")
    except ImportError as error:
        message = 'image folders need Pillow, which is not installed: pip install "harp-prune[images]"'
        raise MissingExtra(message) from error
    labelled = [(path, label) for label, name in enumerate(classes) for path in files.get(name, ())]
    images = np.empty((len(labelled), 3, size, size), np.uint8)
    with warnings.catch_warnings():
        # A picture so large that Pillow warns is as wrong here as a damaged one.
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        for row, (path, _) in enumerate(labelled):
            images[row] = _decode_one(pillow, path, size)
    return images, np.array([label for _, label in labelled], np.int64)


def _decode_one(pillow: Any, path: Path, size: int) -> Bytes:
    """The centre square of an image at the wanted size, planes first."""
    try:
        with pillow.open(path) as image:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.convert("RGB").crop((left, top, left + side, top + side))
            if side != size:
                square = square.resize((size, size), pillow.Resampling.BILINEAR)
            return np.asarray(square, np.uint8).transpose(2, 0, 1)
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged bytes
        raise DataError(f"{path}: can't be decoded ({first_line(error)[:120]}), expected an image") from error
