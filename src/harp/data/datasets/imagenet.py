"""ImageNet (ILSVRC 2012): sorted into folders as everybody has it, or the published archives, read in place."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harp.data import formats
from harp.data.datasets.base import UNKNOWN, Encoded, Found
from harp.data.datasets.devkit import Devkit, find_devkit
from harp.data.datasets.index import Entries, Index, indexed
from harp.data.datasets.wordnet import class_names, read_words
from harp.data.formats import Extents, Integers, TarIndex
from harp.errors import DataError
from harp.system.progress import Quiet

_TRAIN, _VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_NUMBERED = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")
_KIT = "ILSVRC2012_devkit_t12.tar.gz"


@dataclass(frozen=True)
class ImageNet(Encoded):
    """Training images in train/<synset>/ or in their archive; validation images likewise, or all in one folder.

    Classes are in the order of their synsets, as published networks have them. Validation images that are not sorted
    into folders need the development kit for their labels.
    """

    def find(self, folder: Path, display: Quiet) -> Found:
        """Find both parts in the first place that has training images."""
        places = (folder / self.name, folder / "ILSVRC2012", folder)
        place = next((each for each in places if (each / "train").is_dir() or (each / _TRAIN).is_file()), None)
        if place is None:
            raise DataError(f"{self.name}: no train or {_TRAIN} in {folder}, expected {self.files}")
        kit = find_devkit(place)
        synsets, train, train_labels = self._train(place, display)
        test, test_labels = self._val(place, synsets, kit, display)
        words = read_words(place / "LOC_synset_mapping.txt") if kit is None else kit.words
        counts = f"{len(train):,} + {len(test):,} images of {len(synsets)} classes"
        source = f"{place}; {counts}, {UNKNOWN}"
        return Found(train, train_labels, test, test_labels, class_names(synsets, words), source)

    def _train(self, place: Path, display: Quiet) -> tuple[tuple[str, ...], Extents, Integers]:
        if (place / "train").is_dir():
            with display.counting("list train", 1):
                listed = formats.files_by_class(place, "train", display.count)
            synsets = tuple(sorted(listed))
            return synsets, *formats.joined(place, listed, synsets)
        archive = place / _TRAIN
        index = indexed([archive], lambda: _classes_in(archive, display))
        names = sorted({index.names[row].partition("/")[0] for row in _first_of_each(index.labels)})
        return tuple(names), index.extents([archive]), index.labels

    def _val(self, place: Path, synsets: Sequence[str], kit: Devkit | None, display: Quiet) -> tuple[Extents, Integers]:
        folder, archive = place / "val", place / _VAL
        label = {synset: number for number, synset in enumerate(synsets)}
        if folder.is_dir() and any(path.is_dir() for path in folder.iterdir()):
            with display.counting("list val", 1):
                listed = formats.files_by_class(place, "val", display.count)
            if unknown := sorted(set(listed) - set(synsets)):
                raise DataError(f"{folder}: class {unknown[0]} is not in train, expected the classes of train")
            return formats.joined(place, listed, synsets)
        if not folder.is_dir() and not archive.is_file():
            raise DataError(f"{self.name}: no val or {_VAL} in {place}, expected {self.files}")
        if kit is None:
            raise DataError(f"{self.name}: no {_KIT} in {place}, expected it for the labels of val")
        if folder.is_dir():
            names = sorted(path.name for path in folder.iterdir() if _NUMBERED.fullmatch(path.name))
            found = formats.whole_files(
                str(place), [f"val/{name}" for name in names], [(folder / name).stat().st_size for name in names]
            )
        else:
            index = indexed([archive], lambda: _numbered_in(archive, display))
            found = index.extents([archive])
        where = str(folder if folder.is_dir() else archive)
        return found, np.array(list(_truth(found, kit, label, where)), np.int64)


def _first_of_each(labels: Integers) -> list[int]:
    return [int(row) for row in np.unique(labels, return_index=True)[1]]


def _classes_in(path: Path, display: Quiet) -> Index:
    """The images in the archive of training images, which holds an archive a class."""
    outer = sorted((member for member in TarIndex(path) if member.name.endswith(".tar")), key=lambda each: each.name)
    entries = Entries()
    with display.counting(f"index {path.name}", len(outer)):
        for label, member in enumerate(outer):
            synset = Path(member.name).stem
            before = len(entries.names)
            for image in TarIndex(path, inside=member):
                entries.add(f"{synset}/{image.name}", 0, image.offset, image.size, label)
            if len(entries.names) == before:
                raise DataError(f"{path}/{member.name}: no images, expected those of a class")
            display.count(label + 1, len(outer))
    if not outer:
        raise DataError(f"{path}: no archive in it, expected one for each class")
    return entries.index()


def _numbered_in(path: Path, display: Quiet) -> Index:
    """The validation images in their archive, in the order of their numbers; labels are not in it."""
    entries = Entries()
    with display.counting(f"index {path.name}", 1):
        for member in sorted(member for member in TarIndex(path) if _NUMBERED.fullmatch(member.name)):
            entries.add(member.name, 0, member.offset, member.size, 0)
    return entries.index()


def _truth(found: Extents, kit: Devkit, label: dict[str, int], where: str) -> Iterator[int]:
    """The label of each validation image by its number."""
    for row in range(len(found)):
        match = _NUMBERED.fullmatch(found.names[row])
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(kit.synsets):
            raise DataError(f"{where}: image number {number}, expected 1 to {len(kit.synsets)} as in the kit")
        synset = kit.synsets[number - 1]
        if synset not in label:
            raise DataError(f"{where}: image {number} is of class {synset}, expected the classes of train")
        yield label[synset]
