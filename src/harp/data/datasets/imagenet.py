"""ImageNet (ILSVRC 2012): sorted into folders as is usual, or the published archives, which are not extracted."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harp.data.datasets.base import UNKNOWN, Encoded, Listing, contents
from harp.data.datasets.image_folder import class_names, files_by_class, joined, read_words, whole_files
from harp.data.datasets.index import Entry, indexed
from harp.data.formats.bounded import File, read_file
from harp.data.formats.byte_ranges import EncodedImages
from harp.data.formats.matlab import read_mat5_records
from harp.data.formats.tar import TarIndex, read_archive
from harp.errors import DataError
from harp.system.progress import Quiet

_TRAIN, _VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_VAL_NAME = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")
_KIT = "ILSVRC2012_devkit_t12"
_META, _TRUTH = f"{_KIT}/data/meta.mat", f"{_KIT}/data/ILSVRC2012_validation_ground_truth.txt"


class Devkit(NamedTuple):
    """The development kit: the synsets of the validation images by their numbers, and the words of all synsets."""

    synsets: list[str]
    words: dict[str, str]


class ImageNet(Encoded):
    """Training images in train/<synset>/ or in their archive; validation images likewise, or all in one folder.

    Classes are in the order of their synsets, as in published networks. Validation images that are not sorted into
    folders need the development kit for their labels.
    """

    def find(self, folder: Path, display: Quiet) -> Listing:
        """Find both parts in the first folder that has training images."""
        above = (folder.absolute().parent,) if folder.name in ("train", "val") else ()
        places = (folder / self.name, folder / "ILSVRC2012", folder, *above)
        place = next((path for path in places if (path / "train").is_dir() or (path / _TRAIN).is_file()), None)
        if place is None:
            what = f"no train or {_TRAIN} in {folder}"
            raise DataError(f"{self.name}: {what}, expected {self.files}; {contents(folder)}")
        kit = _find_devkit(place)
        synsets, train = _train(place, display)
        test = self._val(place, synsets, kit, display)
        words = read_words(place / "LOC_synset_mapping.txt") if kit is None else kit.words
        source = f"{place}; {len(train):,} + {len(test):,} images of {len(synsets)} classes, {UNKNOWN}"
        return Listing(train, test, class_names(synsets, words), source)

    def _val(self, place: Path, synsets: Sequence[str], kit: Devkit | None, display: Quiet) -> EncodedImages:
        folder, archive = place / "val", place / _VAL
        if folder.is_dir() and any(path.is_dir() for path in folder.iterdir()):
            return joined(place, "val", files_by_class(place, "val", display), synsets)
        if not folder.is_dir() and not archive.is_file():
            raise DataError(f"{self.name}: no val or {_VAL} in {place}, expected {self.files}")
        if kit is None:
            raise DataError(f"{self.name}: no {_KIT}.tar.gz in {place}, expected it for the labels of val")
        if folder.is_dir():
            paths = sorted(path for path in folder.iterdir() if _VAL_NAME.fullmatch(path.name))
            files = [(f"val/{path.name}", path.stat().st_size) for path in paths]
            images = whole_files(place, files, np.zeros(len(files), np.int64))
        else:
            images = indexed([archive], lambda: _scan_val(archive, display))
        labels = _val_labels(images, kit, synsets, folder if folder.is_dir() else archive)
        return replace(images, labels=np.array(list(labels), np.int64))


def _train(place: Path, display: Quiet) -> tuple[tuple[str, ...], EncodedImages]:
    """The synsets and the training images."""
    if (place / "train").is_dir():
        listed = files_by_class(place, "train", display)
        return tuple(sorted(listed)), joined(place, "train", listed, sorted(listed))
    archive = place / _TRAIN
    images = indexed([archive], lambda: _scan_train(archive, display))
    first_of_each = np.unique(images.labels, return_index=True)[1].tolist()
    return tuple(images.names[row].partition("/")[0] for row in first_of_each), images


def _scan_train(path: Path, display: Quiet) -> Iterator[Entry]:
    """The images in the training archive, which holds one archive a class."""
    classes = sorted(member for member in TarIndex(path) if member.name.endswith(".tar"))
    if not classes:
        raise DataError(f"{path}: no archive in it, expected one for each class")
    with display.counting(f"index {path.name}", len(classes)):
        for label, member in enumerate(classes):
            images = list(TarIndex(path, inside=member))
            if not images:
                raise DataError(f"{path}/{member.name}: no images, expected those of a class")
            for image in images:
                yield Entry(f"{Path(member.name).stem}/{image.name}", 0, image.offset, image.size, label)
            display.count(label + 1, len(classes))


def _scan_val(path: Path, display: Quiet) -> Iterator[Entry]:
    """The images in the validation archive by their numbers; the labels are not in it."""
    with display.counting(f"index {path.name}", 1):
        for member in sorted(member for member in TarIndex(path) if _VAL_NAME.fullmatch(member.name)):
            yield Entry(member.name, 0, member.offset, member.size, 0)


def _val_labels(images: EncodedImages, kit: Devkit, synsets: Sequence[str], where: Path) -> Iterator[int]:
    """The label of each validation image by its number."""
    label_of = {synset: label for label, synset in enumerate(synsets)}
    for row in range(len(images)):
        match = _VAL_NAME.fullmatch(images.names[row])
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(kit.synsets):
            raise DataError(f"{where}: image number {number}, expected 1 to {len(kit.synsets)} as in the kit")
        synset = kit.synsets[number - 1]
        if synset not in label_of:
            raise DataError(f"{where}: image {number} is of class {synset}, expected the classes of train")
        yield label_of[synset]


def _find_devkit(place: Path) -> Devkit | None:
    """Read the kit from its folder or its archive, if there is one."""
    archive = place / f"{_KIT}.tar.gz"
    if (place / _KIT).is_dir():
        return _read_devkit(place / _META, place / _TRUTH)
    if archive.is_file():
        members = read_archive(archive, [_META, _TRUTH])
        return _read_devkit(members[_META], members[_TRUTH])
    return None


def _read_devkit(meta: File, truth: File) -> Devkit:
    synset_of, words = {}, {}
    for record in read_mat5_records(meta, "synsets"):
        number, synset, text = (record.get(key) for key in ("ILSVRC2012_ID", "WNID", "words"))
        if isinstance(number, float) and number.is_integer() and isinstance(synset, str):
            synset_of[str(int(number))] = synset
            words[synset] = str(text or synset)
    name, data = read_file(truth, "the ground truth of the validation images")
    numbers = data.decode("ascii", "replace").split()
    for position, number in enumerate(numbers, start=1):
        if number not in synset_of:
            raise DataError(f"{name}: {number[:20]!r} in line {position}, expected a class of meta.mat")
    return Devkit([synset_of[number] for number in numbers], words)
