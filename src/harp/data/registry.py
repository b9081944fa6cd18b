"""Data sets by name.

    data = load("fashion")                        # or "cifar10", "svhn", ..., or "mine.npz"
    rest, held = holdout(data.train, 1000, seed=0)

`harp.batches` makes the batches of an epoch of them.
"""

import difflib
from pathlib import Path

from harp.display import Quiet
from harp.errors import DataError
from harp.sources.cifar import CIFAR10, CIFAR10_CLASSES, CIFAR100, CIFAR100_CLASSES, Cifar
from harp.sources.embedded import Embedded
from harp.sources.folder import Folder
from harp.sources.imagenet import ImageNet
from harp.sources.mnist import DIGITS, FASHION_MD5, GARMENTS, MNIST_MD5, Mnist
from harp.sources.npz import Npz
from harp.sources.shards import Shards
from harp.sources.source import Encoded, Source
from harp.sources.svhn import Svhn
from harp.sources.tiny_imagenet import TinyImageNet
from harp.split import DataSet, Split, check_batch, draw, holdout

__all__ = ["DATASETS", "DEFAULT_FOLDER", "DataSet", "Source", "Split", "check_batch", "draw", "holdout", "load"]

DEFAULT_FOLDER = Path("data")
"""Where the files of a data set are looked for when no folder is given."""

_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_SOURCES: tuple[Source, ...] = (
    Embedded(
        "fashion",
        "part of Fashion-MNIST, shipped with the package: 5,000 + 1,000 garments, 28x28x1",
        "nothing: it is part of the package",
        classes=GARMENTS,
        flip=True,
        origin="embedded part of Fashion-MNIST (Zalando, MIT)",
        sha256="d04b305c5bc1b63d1dc5b4098e79bb7b98d02f3469f51a1721f3d2b3621fafda",
    ),
    Embedded(
        "digits",
        "handwritten digits, shipped with the package: 1,297 + 500, 8x8x1",
        "nothing: it is part of the package",
        classes=DIGITS,
        flip=False,
        origin="embedded handwritten digits (UCI, CC BY 4.0)",
        sha256="a08c87a61a6f8b164e14562e54bd845ff84a0d2301b4d6f38f57c7b61265689b",
    ),
    Cifar(
        "cifar10",
        "CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 32x32x3",
        f"cifar-10-python.tar.gz or its folder, from {_CIFAR_HOME}",
        classes=CIFAR10_CLASSES,
        versions=CIFAR10,
    ),
    Cifar(
        "cifar100",
        "CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 32x32x3",
        f"cifar-100-python.tar.gz or its folder, from {_CIFAR_HOME}",
        classes=CIFAR100_CLASSES,
        versions=CIFAR100,
    ),
    Svhn(
        "svhn",
        "SVHN: 73,257 + 26,032 house number digits, 32x32x3",
        "train_32x32.mat and test_32x32.mat, from http://ufldl.stanford.edu/housenumbers",
        classes=DIGITS,
        balanced=True,
    ),
    Mnist(
        "fashion-mnist",
        "Fashion-MNIST: 60,000 + 10,000 garments, 28x28x1",
        "the four idx .gz files, from https://github.com/zalandoresearch/fashion-mnist",
        classes=GARMENTS,
        digests=FASHION_MD5,
    ),
    Mnist(
        "mnist",
        "MNIST: 60,000 + 10,000 handwritten digits, 28x28x1",
        "the four idx .gz files, from http://yann.lecun.com/exdb/mnist",
        classes=DIGITS,
        flip=False,
        digests=MNIST_MD5,
    ),
    ImageNet(
        "imagenet",
        "ImageNet (ILSVRC 2012): 1,281,167 + 50,000 photographs of 1,000 classes, streamed at 224x224x3",
        "train/<synset>/ and val/<synset>/, or ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and "
        "ILSVRC2012_devkit_t12.tar.gz, from https://image-net.org",
        usual_size=224,
    ),
    TinyImageNet(
        "tiny-imagenet",
        "Tiny-ImageNet: 100,000 + 10,000 photographs of 200 classes, 64x64x3",
        "tiny-imagenet-200.zip, unpacked, from http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        usual_size=64,
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
"""Every data set by name: the table is the documentation of what `load` takes."""


def load(
    name: str,
    data_dir: str | Path | None = None,
    size: int | None = None,
    *,
    stream: bool | None = None,
    margin: float | None = None,
    display: Quiet | None = None,
) -> DataSet:
    """Load a data set of `DATASETS`, or the .npz file whose path is given as `name`.

    `data_dir` (default: data) has the files, directly or in a folder of the data set's name; for "npz" it may
    be the file itself. `size` is the side of the images of sources that resize; the others come as they were published.

    Image files can be streamed: they stay where they are and are decoded when they are needed. `stream` says whether;
    by default they are if they would take more than a quarter of the memory. With a `margin` they always are, and what
    is tested on is the centre of images resized to `margin` times the size.
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
        able = ", ".join(each.name for each in _SOURCES if isinstance(each, Encoded))
        raise DataError(f"{name}: its images are not files, expected {able} to stream or to crop stored pictures")
    data = source.read(folder, size)
    if size is not None and data.shape[1:] != (size, size):
        side = f"{data.shape[1]}x{data.shape[2]}"
        raise DataError(f"{name}: size {size} for images of {side}, expected none: only folder resizes")
    return data
