"""Folders of images: one folder a class, and the layout of Tiny-ImageNet."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harp.data.formats.bounded import Integers, first_line
from harp.data.formats.byte_ranges import Extents, whole_files
from harp.errors import DataError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"))
"""By what a file's name ends if it is taken for an image."""

ANNOTATIONS = "val_annotations.txt"
"""The file beside Tiny-ImageNet's val/images that has their classes."""

Progress = Callable[[int, int], None]
Files = list[tuple[str, int]]  # paths relative to the root, and their bytes


class Listed(NamedTuple):
    """What `list_image_folder` found: where images are, and labels that index `classes`."""

    train: Extents
    train_labels: Integers
    test: Extents
    test_labels: Integers
    classes: tuple[str, ...]


def list_image_folder(
    root: str | Path, progress: Progress = lambda done, total: None, *, held: str | None = None
) -> Listed:
    """Find the images in train/<class>/ and test/<class>/ (or val/<class>/; `held` says which), without opening one.

    Files below a class folder count as well (train/<class>/images/), and so does the published layout of Tiny-ImageNet,
    val/images with val/val_annotations.txt: its test/images have no labels. `progress(done, all)` counts class folders.
    """
    root = Path(root)
    annotated = (root / "val" / ANNOTATIONS).is_file()
    parts = (held,) if held else ("val", "test") if annotated else ("test", "val")
    held = next((part for part in parts if (root / part).is_dir()), None)
    if held is None or not (root / "train").is_dir():
        raise DataError(f"{root}: expected the folders train and test (or val), each with one folder a class")
    try:
        train = files_by_class(root, "train", progress)
        annotated = (root / held / ANNOTATIONS).is_file() and (root / held / "images").is_dir()
        test = _annotated_files(root, held) if annotated else files_by_class(root, held, progress)
    except OSError as error:
        raise DataError(f"{root}: can't be listed ({first_line(error)}), expected readable folders") from error
    classes = tuple(sorted(train))
    if unknown := sorted(set(test) - set(classes)):
        raise DataError(f"{root / held}: class {unknown[0]} is not in train, expected the classes of train")
    return Listed(*joined(root, train, classes), *joined(root, test, classes), classes)


def memory_size() -> int | None:
    """The machine's memory in bytes, where the system tells."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def files_by_class(root: Path, part: str, progress: Progress = lambda done, total: None) -> dict[str, Files]:
    """The image files below each class folder of a part, in the order of their names."""
    folder = root / part
    with os.scandir(folder) as entries:
        groups = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    found: dict[str, Files] = {}
    for number, group in enumerate(groups, start=1):
        inside = sorted(_image_files(str(folder / group)), key=lambda each: each[0].split(os.sep))
        found[group] = [(f"{part}{os.sep}{group}{os.sep}{name}", size) for name, size in inside]
        if not found[group]:
            raise DataError(f"{folder / group}: no images, expected files such as .png or .jpg")
        progress(number, len(groups))
    if not found:
        raise DataError(f"{folder}: no class folders, expected one folder of images a class")
    return found


def _image_files(folder: str, below: str = "") -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _image_files(entry.path, f"{below}{entry.name}{os.sep}")
            elif _named_like_an_image(entry.name) and entry.is_file():
                yield below + entry.name, entry.stat().st_size


def _named_like_an_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def _annotated_files(root: Path, part: str) -> dict[str, Files]:
    """The files in Tiny-ImageNet's val_annotations.txt: a line starts with a file name and its class."""
    annotations = root / part / ANNOTATIONS
    found: dict[str, Files] = {}
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or Path(fields[0]).name != fields[0]:
            raise DataError(f"{annotations}: line {number} is {line[:60]!r}, expected a file name, a tab and a class")
        name = os.path.join(part, "images", fields[0])
        size = os.path.getsize(root / name) if (root / name).is_file() else 0
        found.setdefault(fields[1], []).append((name, size))
    if not found:
        raise DataError(f"{annotations}: empty, expected a line for each image")
    return found


def joined(root: Path, files: dict[str, Files], classes: Sequence[str]) -> tuple[Extents, Integers]:
    """The files of all classes, class by class, and their labels."""
    listed = [each for name in classes for each in files.get(name, ())]
    counts = [len(files.get(name, ())) for name in classes]
    extents = whole_files(str(root), [name for name, _ in listed], [size for _, size in listed])
    return extents, np.repeat(np.arange(len(classes), dtype=np.int64), counts)
