"""CIFAR-10 and CIFAR-100, in the python or the binary version, extracted or in their archive."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harp.data.dataset import DataSet
from harp.data.datasets.base import Part, Published, md5
from harp.data.formats.bounded import Array, Bytes, File, Integers, Payload, first_line, read_file
from harp.data.formats.safe_pickle import PickledArray, as_text, unpickle
from harp.data.formats.tar import read_archive
from harp.errors import DataError

_PIXELS = 3 * 32 * 32  # bytes of an image: the red, the green and the blue plane


def read_cifar_batch(file: File) -> tuple[Bytes, Integers]:
    """Read a python batch of CIFAR-10, or CIFAR-100 (fine labels): images [N, 3, 32, 32] and labels [N]."""
    expected = "a CIFAR batch pickle"
    payload = read_file(file, expected)
    name, batch = payload.name, unpickle(payload, expected)
    if not isinstance(batch, dict):
        raise DataError(f"{name}: holds a {type(batch).__name__}, expected a dict with data and labels")
    entries = {as_text(key): value for key, value in batch.items() if isinstance(key, bytes | str)}
    try:
        images = _plain_array(entries.get("data"))
        labels = _plain_array(entries.get("fine_labels", entries.get("labels")))
    except ValueError as error:
        raise DataError(f"{name}: {first_line(error)}, expected uint8 data and integer labels") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != _PIXELS or not len(images):
        raise DataError(f"{name}: data is {images.dtype} {images.shape}, expected uint8 (N, {_PIXELS})")
    if labels.shape != images.shape[:1]:
        raise DataError(f"{name}: labels of shape {labels.shape}, expected one for each of {len(images):,} images")
    return np.ascontiguousarray(images).reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _plain_array(value: object) -> Array:
    if isinstance(value, PickledArray):
        return value.array()
    if isinstance(value, list) and all(type(item) is int and abs(item) < 1 << 31 for item in value):
        return np.array(value, np.int64)
    raise ValueError("data or labels are missing" if value is None else f"a {type(value).__name__} in the batch")


def read_cifar_binary(file: File, label_bytes: int) -> tuple[Bytes, Integers]:
    """Read a file of the binary version: images [N, 3, 32, 32] and labels [N].

    A record has `label_bytes` bytes (1 for CIFAR-10; 2 for CIFAR-100, coarse then fine: the last one is used) and 3,072
    bytes of pixels.
    """
    record = label_bytes + _PIXELS
    name, data = read_file(file, "a CIFAR binary batch")
    if not data or len(data) % record:
        published = f"{10_000 * record:,} for 10,000 images"
        raise DataError(f"{name}: {len(data):,} bytes, expected a multiple of {record:,} ({published})")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    images = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return images, records[:, label_bytes - 1].astype(np.int64)


@dataclass(frozen=True)
class Version:
    """A published version of CIFAR: its folder, its archive, and the md5 of its files, the test file last.

    `label_bytes`: of a record in the binary version; None: the python version. `by_record`: the md5 is that of the same
    batch in the binary version, which is the same for every way to store it.
    """

    folder: str
    archive: str
    files: dict[str, str | None]
    label_bytes: int | None = None
    by_record: bool = False

    def read(self, name: str, payload: Payload) -> Part:
        """Read a file of this version, and compare it with the published one."""
        if self.label_bytes is None:
            images, labels = read_cifar_batch(payload)
        else:
            images, labels = read_cifar_binary(payload, self.label_bytes)
        data: bytes | memoryview = payload.data
        if self.by_record:
            label_bytes = (labels & 0xFF).astype(np.uint8)[:, None]
            data = np.concatenate([label_bytes, images.reshape(len(images), -1)], axis=1).data
        expected = self.files[name]
        return Part(name, images, labels, None if expected is None else md5(data) == expected)


@dataclass(frozen=True, kw_only=True)
class Cifar(Published):
    """CIFAR, in any version."""

    versions: tuple[Version, ...]

    def read(self, folder: Path) -> DataSet:
        """Read an extracted folder, or else an archive, which is not extracted."""
        choices = [(place, version) for place in self.places(folder) for version in self.versions]
        for place, version in choices:
            for extracted in (place / version.folder, place):
                named = extracted.name == version.folder and extracted.is_dir()
                if named or (extracted / next(iter(version.files))).is_file():
                    payloads = {file: self._file(extracted, file) for file in version.files}
                    return self._join(version, payloads, extracted)
        for place, version in choices:
            archive = place / version.archive
            if archive.is_file():
                members = read_archive(archive, [f"{version.folder}/{file}" for file in version.files])
                payloads = {file: members[f"{version.folder}/{file}"] for file in version.files}
                return self._join(version, payloads, archive)
        raise self.missing(f"{self.versions[0].folder} or {self.versions[0].archive}", folder)

    def _file(self, folder: Path, file: str) -> Payload:
        if not (folder / file).exists():
            raise self.missing(file, folder)
        return read_file(folder / file, "a CIFAR batch")

    def _join(self, version: Version, payloads: dict[str, Payload], origin: Path) -> DataSet:
        *train, test = (version.read(file, payload) for file, payload in payloads.items())
        return self.assemble(train, test, origin)


_CIFAR10_MD5: dict[str, str | None] = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_CIFAR10_BINARY_MD5 = {f"{name}.bin": digest for name, digest in _CIFAR10_MD5.items()}
_CIFAR100_MD5: dict[str, str | None] = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}
CIFAR10 = (
    Version("cifar-10-batches-py", "cifar-10-python.tar.gz", _CIFAR10_MD5, by_record=True),
    Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", _CIFAR10_BINARY_MD5, label_bytes=1),
)
CIFAR100 = (
    Version("cifar-100-python", "cifar-100-python.tar.gz", _CIFAR100_MD5),
    Version("cifar-100-binary", "cifar-100-binary.tar.gz", {"train.bin": None, "test.bin": None}, label_bytes=2),
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_CIFAR100_NAMES.split())
