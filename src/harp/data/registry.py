"""Data sets by name.

    data = load("fashion")                        # or "cifar10", "svhn", ..., "mine.npz", or a folder of pictures
    rest, held = holdout(data.train, 1000, seed=0)

`harp.data.batches` makes the batches of an epoch.
"""

import difflib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from harp.data.dataset import TEST_SHARE, DataSet, Split, draw, holdout
from harp.data.datasets.base import Encoded, Facts, InMemory, Preset
from harp.data.datasets.cifar import CIFAR10, CIFAR10_CLASSES, CIFAR100, CIFAR100_CLASSES, Cifar
from harp.data.datasets.huggingface import HuggingFace, is_saved
from harp.data.datasets.image_folder import Folder, TinyImageNet
from harp.data.datasets.imagenet import ImageNet
from harp.data.datasets.mnist import DIGITS, FASHION_MD5, GARMENTS, MNIST_MD5, Mnist
from harp.data.datasets.npz import Embedded, Npz
from harp.data.datasets.shards import Shards
from harp.data.datasets.svhn import Svhn
from harp.errors import DataError
from harp.system.progress import Quiet

logger = logging.getLogger("harp")

__all__ = [
    "DATASETS",
    "DEFAULT_FOLDER",
    "DataSet",
    "Place",
    "Split",
    "draw",
    "facts",
    "find",
    "holdout",
    "is_path",
    "is_shipped",
    "is_users",
    "load",
]

DEFAULT_FOLDER = Path("data")
"""The default folder for the files of data sets."""

AnySource = InMemory | Encoded | HuggingFace

_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_SOURCES: tuple[AnySource, ...] = (
    Embedded(
        "fashion",
        "part of Fashion-MNIST, shipped with the package: 5,000 + 1,000 garments, 28x28x1",
        "nothing: it is part of the package",
        classes=GARMENTS,
        flip=True,
        origin="embedded part of Fashion-MNIST (Zalando, MIT)",
        sha256="d04b305c5bc1b63d1dc5b4098e79bb7b98d02f3469f51a1721f3d2b3621fafda",
        facts=Facts(5_000, 1_000, (1, 28, 28), 10, "fashion_mnist"),
        preset=Preset("0.1", "0.025", (20, 10, 20), pad=2),
    ),
    Embedded(
        "digits",
        "handwritten digits, shipped with the package: 1,297 + 500, 8x8x1",
        "nothing: it is part of the package",
        classes=DIGITS,
        flip=False,
        origin="embedded handwritten digits (UCI, CC BY 4.0)",
        sha256="a08c87a61a6f8b164e14562e54bd845ff84a0d2301b4d6f38f57c7b61265689b",
        facts=Facts(1_297, 500, (1, 8, 8), 10),
        preset=Preset("0.15", "0.0375", (20, 20, 20), pad=1),
    ),
    Cifar(
        "cifar10",
        "CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 32x32x3",
        f"cifar-10-python.tar.gz or its folder, from {_CIFAR_HOME}",
        classes=CIFAR10_CLASSES,
        versions=CIFAR10,
        facts=Facts(50_000, 10_000, (3, 32, 32), 10, "cifar10"),
    ),
    Cifar(
        "cifar100",
        "CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 32x32x3",
        f"cifar-100-python.tar.gz or its folder, from {_CIFAR_HOME}",
        classes=CIFAR100_CLASSES,
        versions=CIFAR100,
        facts=Facts(50_000, 10_000, (3, 32, 32), 100, "cifar100"),
    ),
    Svhn(
        "svhn",
        "SVHN: 73,257 + 26,032 house number digits, 32x32x3",
        "train_32x32.mat and test_32x32.mat, from http://ufldl.stanford.edu/housenumbers",
        classes=DIGITS,
        balanced=True,
        facts=Facts(73_257, 26_032, (3, 32, 32), 10, "svhn"),
    ),
    Mnist(
        "fashion-mnist",
        "Fashion-MNIST: 60,000 + 10,000 garments, 28x28x1",
        "the four idx .gz files, from https://github.com/zalandoresearch/fashion-mnist",
        classes=GARMENTS,
        digests=FASHION_MD5,
        facts=Facts(60_000, 10_000, (1, 28, 28), 10, "fashion_mnist"),
        preset=Preset("0.1", "0.025", (20, 10, 20), pad=2),
    ),
    Mnist(
        "mnist",
        "MNIST: 60,000 + 10,000 handwritten digits, 28x28x1",
        "the four idx .gz files, from http://yann.lecun.com/exdb/mnist",
        classes=DIGITS,
        flip=False,
        digests=MNIST_MD5,
        facts=Facts(60_000, 10_000, (1, 28, 28), 10, "mnist"),
        preset=Preset("0.3", "0.075", (20, 10, 20), pad=2),
    ),
    ImageNet(
        "imagenet",
        "ImageNet (ILSVRC 2012): 1,281,167 + 50,000 photographs of 1,000 classes, streamed at 224x224x3",
        "train/<synset>/ and val/<synset>/, or ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and "
        "ILSVRC2012_devkit_t12.tar.gz, from https://image-net.org",
        facts=Facts(1_281_167, 50_000, (3, 224, 224), 1_000),
    ),
    TinyImageNet(
        "tiny-imagenet",
        "Tiny-ImageNet: 100,000 + 10,000 photographs of 200 classes, 64x64x3",
        "tiny-imagenet-200.zip, unpacked, from http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        facts=Facts(100_000, 10_000, (3, 64, 64), 200),
    ),
    Folder(
        "folder",
        "your images: train/<class>/ and test/<class>/ (or val/<class>/), or just <class>/, at the size you give",
        "a folder with train and test (or val), each with one folder of images a class, or one folder a class",
    ),
    Shards(
        "shards",
        "your images in tar archives, as WebDataset has them (`harp shard` makes them), at the size you give",
        "train-000000.tar, ... and test-000000.tar (or val-000000.tar), ...",
    ),
    Npz(
        "npz",
        "your arrays: x_train, y_train, x_test and y_test in an .npz file",
        "an .npz file, or a folder with data.npz",
    ),
    HuggingFace(
        "huggingface",
        "a data set of Hugging Face's `datasets` on disk, as save_to_disk writes it",
        "the folder that save_to_disk wrote",
    ),
)
_TELLING = {
    "cifar10": "data_batch_1",
    "cifar100": "cifar-100-python",
    "svhn": "train_32x32.mat",
    "fashion-mnist or mnist": "train-images-idx3-ubyte.gz",
}
"""Files by which a folder is known to hold the data set of a name."""
DATASETS = {source.name: source for source in _SOURCES}
"""All data sets by name."""


def facts(name: str) -> Facts | None:
    """A data set as it was published; None if it is only known from its files."""
    source = DATASETS.get(name)
    return None if source is None else source.facts


@dataclass(frozen=True)
class Place:
    """What reads a data set, and the folder or file that it reads."""

    source: AnySource
    path: Path

    @property
    def resizes(self) -> bool:
        """Whether its images are resized to a size that somebody has to say."""
        return not isinstance(self.source, InMemory) and self.source.facts is None

    def first_size(self, display: Quiet | None = None) -> tuple[int, int]:
        """Width and height of the first image, of data that is resized."""
        display = display or Quiet()
        if isinstance(self.source, Encoded | HuggingFace):
            return self.source.first_size(self.path, display)
        raise DataError(f"{self.source.name}: all its images have one size")


def is_path(name: str) -> bool:
    """Whether a data set is named by its folder or file, not by a name of `DATASETS`."""
    return name not in DATASETS


def is_shipped(name: str) -> bool:
    """Whether a data set is a part of the package."""
    return isinstance(DATASETS.get(name), Embedded)


def is_users(name: str) -> bool:
    """Whether a name stands for data of the user, whose place it does not say."""
    return name in DATASETS and DATASETS[name].facts is None


def find(name: str, data_dir: str | Path | None = None) -> Place:
    """What a user wrote as data: a name of `DATASETS`, an .npz file, or a folder of images or of `datasets`.

    A path is looked for in `data_dir` first, if that is given.
    """
    if name in DATASETS:
        return Place(DATASETS[name], DEFAULT_FOLDER if data_dir is None else Path(data_dir).expanduser())
    path = Path(name).expanduser()
    places = [path]
    if data_dir is not None:
        folder = Path(data_dir).expanduser()
        places = [folder / path, folder / path.name, folder, path]
    if name.endswith(".npz"):
        return Place(DATASETS["npz"], next(filter(Path.is_file, places), places[0]))
    found = next(filter(Path.is_dir, places), None)
    if found is not None:
        return Place(_source_of(found), found)
    if path.exists():
        raise DataError(f"{path} is a file: expected a folder of images, an .npz file or a name of `harp list data`")
    if os.sep in name:
        raise DataError(
            f"{path}: no such folder, expected a folder of images, an .npz file or a name of `harp list data`"
        )
    near = difflib.get_close_matches(name.lower(), DATASETS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(DATASETS)
    raise DataError(f"no data set {name!r}: {hint}expected {known} or a path to an .npz file or a folder of images")


def _source_of(folder: Path) -> AnySource:
    """What reads a folder, by the files in it."""
    if is_saved(folder):
        return DATASETS["huggingface"]
    if any(folder.glob("*train*.tar")):
        return DATASETS["shards"]
    if (folder / "data.npz").is_file():
        return DATASETS["npz"]
    for name, file in _TELLING.items():
        if (folder / file).exists():
            raise DataError(f"{folder} holds {file}, of a data set with a name: --data {name} --data-dir {folder}")
    return DATASETS["folder"]


def load(
    name: str,
    data_dir: str | Path | None = None,
    size: int | None = None,
    *,
    stream: bool | None = None,
    margin: float | None = None,
    display: Quiet | None = None,
) -> DataSet:
    """Load a data set of `DATASETS`, or an .npz file or a folder of images by its path.

    The files are in `data_dir` (default: data), or in a folder there with the name of the data set; for "npz" it may be
    the file itself. `size` is the side length of images, for data sets that resize; the others have a fixed size.

    Image files can be streamed: they stay on disk and are decoded when they are needed. By default they are streamed if
    they would take more than a quarter of the memory; `stream` overrides this. With a `margin` they are always
    streamed, and test images are the centre of the stored images resized to `margin` times the size.

    Arguments:
        name: the name of the data set, or the path of an .npz file or of a folder of images.
        data_dir: the folder with the files.
        size: the side length of an image in pixels.
        stream: decode images when they are needed.
        margin: the size of an image, relative to `size`, before its centre is cut out.
        display: shows progress.

    Example:
        data = harp.load_data("digits")
        print(len(data.train), data.shape, data.num_classes)
    """
    source, folder = (place := find(name, data_dir)).source, place.path
    data = _opened(source, folder, size, stream, margin, display)
    if data.drawn:
        count, total = len(data.test), len(data.train) + len(data.test)
        share = f"{count:,} of its {total:,} images, {TEST_SHARE:.0%} of each class and always the same"
        logger.info("%s: no test images of its own, so these are %s", folder, share)
    return data


def _opened(
    source: AnySource, folder: Path, size: int | None, stream: bool | None, margin: float | None, display: Quiet | None
) -> DataSet:
    if isinstance(source, Encoded):
        return source.open(folder, size, stream=stream, margin=margin, display=display)
    if stream or margin is not None:
        encoded = ", ".join(other.name for other in _SOURCES if isinstance(other, Encoded))
        raise DataError(
            f"{source.name}: its images are not files, expected {encoded} to stream or to crop stored pictures"
        )
    if isinstance(source, HuggingFace):
        return source.open(folder, size, display)
    data = source.read(folder)
    if size is not None and data.shape[1:] != (size, size):
        side = f"{data.shape[1]}x{data.shape[2]}"
        raise DataError(f"{source.name}: size {size} for images of {side}, expected none: only folder resizes")
    return data
