"""Data sets by name.

    data = load("fashion")                        # or "cifar10", "svhn", ..., or "mine.npz"
    rest, held = holdout(data.train, 1000, seed=0)

`harp.data.batches` makes the batches of an epoch.
"""

import difflib
from pathlib import Path

from harp.data.dataset import DataSet, Split, draw, holdout
from harp.data.datasets.base import Encoded, Facts, InMemory, Preset
from harp.data.datasets.cifar import CIFAR10, CIFAR10_CLASSES, CIFAR100, CIFAR100_CLASSES, Cifar
from harp.data.datasets.image_folder import Folder, TinyImageNet
from harp.data.datasets.imagenet import ImageNet
from harp.data.datasets.mnist import DIGITS, FASHION_MD5, GARMENTS, MNIST_MD5, Mnist
from harp.data.datasets.npz import Embedded, Npz
from harp.data.datasets.shards import Shards
from harp.data.datasets.svhn import Svhn
from harp.errors import DataError
from harp.system.progress import Quiet

__all__ = ["DATASETS", "DEFAULT_FOLDER", "DataSet", "Split", "draw", "facts", "holdout", "load"]

DEFAULT_FOLDER = Path("data")
"""The default folder for the files of data sets."""

_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_SOURCES: tuple[InMemory | Encoded, ...] = (
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
        "your images: train/<class>/ and test/<class>/ (or val/<class>/), at the size you give",
        "a folder with train and test (or val), each with one folder of images a class",
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
)
DATASETS = {source.name: source for source in _SOURCES}
"""All data sets by name."""


def facts(name: str) -> Facts | None:
    """A data set as it was published; None if it is only known from its files."""
    source = DATASETS.get(name)
    return None if source is None else source.facts


def load(
    name: str,
    data_dir: str | Path | None = None,
    size: int | None = None,
    *,
    stream: bool | None = None,
    margin: float | None = None,
    display: Quiet | None = None,
) -> DataSet:
    """Load a data set of `DATASETS`, or an .npz file by its path.

    The files are in `data_dir` (default: data), or in a folder there with the name of the data set; for "npz" it may be
    the file itself. `size` is the side length of images, for data sets that resize; the others have a fixed size.

    Image files can be streamed: they stay on disk and are decoded when they are needed. By default they are streamed if
    they would take more than a quarter of the memory; `stream` overrides this. With a `margin` they are always
    streamed, and test images are the centre of the stored images resized to `margin` times the size.

    Arguments:
        name: the name of the data set, or the path of an .npz file.
        data_dir: the folder with the files.
        size: the side length of an image in pixels.
        stream: decode images when they are needed.
        margin: the size of an image, relative to `size`, before its centre is cut out.
        display: shows progress.

    Example:
        data = harp.load_data("digits")
        print(len(data.train), data.shape, data.num_classes)
    """
    folder = DEFAULT_FOLDER if data_dir is None else Path(data_dir)
    if name.endswith(".npz"):
        path = Path(name)
        folder, name = (path if path.exists() or data_dir is None else folder / path), "npz"
    if name not in DATASETS:
        near = difflib.get_close_matches(name.lower(), DATASETS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise DataError(f"no data set {name!r}: {hint}expected {', '.join(DATASETS)} or a path to an .npz file")
    source = DATASETS[name]
    if isinstance(source, Encoded):
        return source.open(folder, size, stream=stream, margin=margin, display=display)
    if stream or margin is not None:
        encoded = ", ".join(other.name for other in _SOURCES if isinstance(other, Encoded))
        raise DataError(f"{name}: its images are not files, expected {encoded} to stream or to crop stored pictures")
    data = source.read(folder)
    if size is not None and data.shape[1:] != (size, size):
        side = f"{data.shape[1]}x{data.shape[2]}"
        raise DataError(f"{name}: size {size} for images of {side}, expected none: only folder resizes")
    return data
