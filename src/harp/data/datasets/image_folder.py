"""Folders of images, one folder a class: the user's, and Tiny-ImageNet."""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from harp.data.dataset import draw_test
from harp.data.datasets.base import UNKNOWN, Encoded, Listing, contents
from harp.data.formats.bounded import Integers, first_line
from harp.data.formats.byte_ranges import EncodedImages, Names
from harp.errors import DataError
from harp.system.progress import Quiet

logger = logging.getLogger("harp")

_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"))
_EXPECTED = "expected the folders train and test (or val), each with one folder a class, or one folder a class"
_TRAIN, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_ANNOTATIONS = "val_annotations.txt"  # the classes of the images in Tiny-ImageNet's val/images
Files = list[tuple[str, int]]  # paths relative to the root, and their sizes in bytes


class Folder(Encoded):
    """The images of the user, at any size."""

    def find(self, folder: Path, display: Quiet) -> Listing:
        """List all images below `folder`."""
        return list_image_folder(folder, display)


class TinyImageNet(Encoded):
    """200 classes of ImageNet at 64x64 pixels: as published, or with one folder a class in val too.

    Classes are in the order of their synsets. The test images have no labels and are not used.
    """

    def find(self, folder: Path, display: Quiet) -> Listing:
        """List the first folder that has training images."""
        places = (folder / self.name, folder / "tiny-imagenet-200", folder, folder.absolute().parent)
        place = next((place for place in places if (place / "train").is_dir() and (place / "val").is_dir()), None)
        if place is None:
            raise DataError(f"{self.name}: no train and val in {folder}, expected {self.files}; {contents(folder)}")
        listing = list_image_folder(place, display, test="val")
        return listing._replace(classes=class_names(listing.classes, read_words(place / "words.txt")))


def list_image_folder(root: Path, display: Quiet, test: str | None = None) -> Listing:
    """Find the images in train/<class>/ and test/<class>/ (or val/<class>/; `test` says which), without opening one.

    Files in folders below a class folder are included (train/<class>/images/). The published layout of Tiny-ImageNet is
    known too: val/images with val/val_annotations.txt. Where there is no folder of test images, or just one folder a
    class, test images are drawn.
    """
    try:
        if not root.is_dir():
            raise DataError(f"{root}: {_EXPECTED}; {contents(root)}")
        root = root if test else _tree(root)
        train_part = _part(root, _TRAIN)
        annotated = (root / "val" / _ANNOTATIONS).is_file()
        part = _part(root, (test,) if test else ("val", "test") if annotated else _TEST)
        if train_part is None and (part is not None or len(_folders(root)) < 2):
            raise DataError(f"{root}: {_EXPECTED}; {contents(root)}")
        train_files = files_by_class(root, train_part or "", display)
        classes = tuple(sorted(train_files))
        if part is None:
            return _drawn(root, train_files, classes)
        annotated = (root / part / _ANNOTATIONS).is_file() and (root / part / "images").is_dir()
        test_files = _annotated_files(root, part) if annotated else files_by_class(root, part, display)
    except OSError as error:
        raise DataError(f"{root}: can't be listed ({first_line(error)}), expected readable folders") from error
    train, test_images = joined(root, train_part or "", train_files, classes), joined(root, part, test_files, classes)
    return Listing(train, test_images, classes, f"{root}; {UNKNOWN}")


def _folders(root: Path) -> list[Path]:
    """The folders in a folder, without hidden ones and what macOS leaves in archives."""
    with os.scandir(root) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir() and not _is_hidden(entry.name))


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def _part(root: Path, names: Sequence[str]) -> str | None:
    """The first folder of these names, in small or large letters, that has folders of its own."""
    own = {path.name.lower(): path for path in _folders(root)}
    return next((own[name].name for name in names if name in own and _folders(own[name])), None)


def _tree(root: Path) -> Path:
    """The folder that has the parts or the classes, also if one of its parts or the folder above it is given."""
    if _part(root, _TRAIN):
        return root
    above = root.absolute().parent
    if root.absolute().name.lower() in (*_TRAIN, *_TEST) and _part(above, _TRAIN) and _part(above, _TEST):
        logger.info("%s is a part of %s, which has training and test images", root, above)
        return above
    only = _folders(root)
    return _tree(only[0]) if len(only) == 1 and _folders(only[0]) else root


def _drawn(root: Path, listed: Mapping[str, Files], classes: Sequence[str]) -> Listing:
    """A part of all images as the test images."""
    files = [file for name in classes for file in listed[name]]
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(listed[name]) for name in classes])
    test = draw_test(torch.from_numpy(labels), str(root)).numpy()
    chosen = [np.flatnonzero(rows) for rows in (~test, test)]
    train, drawn = (whole_files(root, [files[row] for row in rows], labels[rows]) for rows in chosen)
    return Listing(train, drawn, tuple(classes), f"{root}; test images drawn from all, {UNKNOWN}", drawn=True)


def files_by_class(root: Path, part: str, display: Quiet) -> dict[str, Files]:
    """The image files below each class folder of a part, sorted by name."""
    folder = root / part
    groups = [path.name for path in _folders(folder)]
    above = f"{part}{os.sep}" if part else ""
    listed: dict[str, Files] = {}
    with display.counting(f"list {part or root.name}", len(groups)):
        for number, group in enumerate(groups, start=1):
            inside = sorted(_image_files(str(folder / group)), key=lambda file: file[0].split(os.sep))
            listed[group] = [(f"{above}{group}{os.sep}{name}", size) for name, size in inside]
            if not inside:
                raise DataError(f"{folder / group}: no images, expected files such as .png or .jpg")
            display.count(number, len(groups))
    if not listed:
        raise DataError(f"{folder}: no class folders, expected one folder of images a class")
    return listed


def _image_files(folder: str, below: str = "") -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _image_files(entry.path, f"{below}{entry.name}{os.sep}")
            elif os.path.splitext(entry.name)[1].lower() in _SUFFIXES and entry.name[0] != "." and entry.is_file():
                yield below + entry.name, entry.stat().st_size


def _annotated_files(root: Path, part: str) -> dict[str, Files]:
    """The files in Tiny-ImageNet's val_annotations.txt: a line starts with a file name and its class."""
    annotations = root / part / _ANNOTATIONS
    listed: dict[str, Files] = {}
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or Path(fields[0]).name != fields[0]:
            raise DataError(f"{annotations}: line {number} is {line[:60]!r}, expected a file name, a tab and a class")
        name = os.path.join(part, "images", fields[0])
        size = os.path.getsize(root / name) if (root / name).is_file() else 0
        listed.setdefault(fields[1], []).append((name, size))
    if not listed:
        raise DataError(f"{annotations}: empty, expected a line for each image")
    return listed


def joined(root: Path, part: str, listed: Mapping[str, Files], classes: Sequence[str]) -> EncodedImages:
    """The files of all classes, class by class."""
    if unknown := sorted(set(listed) - set(classes)):
        raise DataError(f"{root / part}: class {unknown[0]} is not in train, expected the classes of train")
    files = [file for name in classes for file in listed.get(name, ())]
    counts = [len(listed.get(name, ())) for name in classes]
    return whole_files(root, files, np.repeat(np.arange(len(classes), dtype=np.int64), counts))


def whole_files(root: Path, files: Files, labels: Integers) -> EncodedImages:
    """Images that are files of their own."""
    sizes = np.array([size for _, size in files], np.int64)
    return EncodedImages(str(root), Names.of(name for name, _ in files), sizes, labels)


def read_words(path: Path) -> dict[str, str]:
    """The words of WordNet's synsets, from a file whose lines are a synset such as n01440764 and its words."""
    if not path.is_file():
        return {}
    lines = (line.strip().split(None, 1) for line in path.read_text("utf-8", "replace").splitlines())
    return {fields[0]: fields[1] for fields in lines if len(fields) == 2}


def class_names(synsets: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """The first word of each synset; with the synset if two have the same one (crane, a bird and a machine)."""
    names = [words.get(synset, synset).split(",")[0].strip() or synset for synset in synsets]
    counts = Counter(names)
    pairs = zip(names, synsets, strict=True)
    return tuple(name if counts[name] == 1 else f"{name} ({synset})" for name, synset in pairs)
