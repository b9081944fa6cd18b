"""CIFAR-10 and CIFAR-100, in the python or the binary version, extracted or in their archive."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from harp.data import formats
from harp.data.dataset import DataSet
from harp.data.datasets.base import Checked, Published, md5
from harp.data.formats import Bytes, Integers, Payload


@dataclass(frozen=True)
class Version:
    """One published version of CIFAR: its folder, its archive and the md5 of its files, the test last.

    `by_record`: the md5 is the one of the same batch in the binary version, not of the file as it is.
    """

    folder: str
    archive: str
    files: dict[str, str | None]
    read: Callable[[Payload], tuple[Bytes, Integers]]
    by_record: bool = False

    def check(self, name: str, payload: Payload) -> Checked:
        """Parse a file of this version and compare it with the published one."""
        images, labels = self.read(payload)
        digest = _record_md5(images, labels) if self.by_record else md5(payload.data)
        expected = self.files[name]
        return Checked(name, images, labels, None if expected is None else digest == expected)

    def is_in(self, folder: Path) -> bool:
        """Whether this version was extracted into `folder`, complete or not."""
        first = next(iter(self.files))
        return (folder / first).is_file() or (folder.name == self.folder and folder.is_dir())


@dataclass(frozen=True, kw_only=True)
class Cifar(Published):
    """CIFAR in whichever version is there."""

    versions: tuple[Version, ...]

    def read(self, folder: Path, size: int | None) -> DataSet:
        """An extracted folder first, then an archive, which is not extracted."""
        choices = [(place, version) for place in self.places(folder) for version in self.versions]
        for place, version in choices:
            for extracted in (place / version.folder, place):
                if version.is_in(extracted):
                    return self._join(version, partial(self._from_folder, extracted), extracted)
        for place, version in choices:
            archive = place / version.archive
            if archive.is_file():
                members = formats.read_archive(archive, [f"{version.folder}/{file}" for file in version.files])
                held = {file: members[f"{version.folder}/{file}"] for file in version.files}
                return self._join(version, held.__getitem__, archive)
        raise self.missing(f"{self.versions[0].folder} or {self.versions[0].archive}", folder)

    def _from_folder(self, folder: Path, file: str) -> Payload:
        if not (folder / file).exists():
            raise self.missing(file, folder)
        return formats.read_file(folder / file, "a CIFAR batch")

    def _join(self, version: Version, fetch: Callable[[str], Payload], origin: Path) -> DataSet:
        *train, test = (version.check(file, fetch(file)) for file in version.files)
        return self.assemble(train, test, origin)


def _record_md5(images: Bytes, labels: Integers) -> str:
    """The md5 that the batch has as a file of the binary version: the same for every way to store it."""
    label_bytes = (labels & 0xFF).astype(np.uint8)[:, None]
    return md5(np.concatenate([label_bytes, images.reshape(len(images), -1)], axis=1).data)


_CIFAR10_MD5 = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10 = (
    Version(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        files=dict(_CIFAR10_MD5),
        read=formats.read_cifar_batch,
        by_record=True,
    ),
    Version(
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        files={f"{name}.bin": digest for name, digest in _CIFAR10_MD5.items()},
        read=partial(formats.read_cifar_binary, label_bytes=1),
    ),
)
CIFAR100 = (
    Version(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        files={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        read=formats.read_cifar_batch,
    ),
    Version(
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        files={"train.bin": None, "test.bin": None},
        read=partial(formats.read_cifar_binary, label_bytes=2),
    ),
)
# fmt: off
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)
CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
    "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
    "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur",
    "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo",
    "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree",
    "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree",
    "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit",
    "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe",
    "whale", "willow_tree", "wolf", "woman", "worm",
)
# fmt: on
