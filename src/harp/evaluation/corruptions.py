"""Accuracy under common corruptions, on the published files of CIFAR-10-C, CIFAR-100-C, ImageNet-C and Tiny-ImageNet-C.

Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019.
The folder has one of two layouts, with the severities 1 to 5:

    KIND.npy and labels.npy          CIFAR: bytes (5 N, height, width, channels), the N test images in their order at
                                     severity 1, then at severity 2, and so on; and their 5 N labels
    KIND/SEVERITY/CLASS/*.JPEG       ImageNet: one folder for each class, in the order of the classes

The files are not trusted: the sizes in a header are checked before anything is allocated, and nothing is unpickled.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from harp.data.dataset import DataSet, Split
from harp.data.datasets.image_folder import files_by_class, joined
from harp.data.formats.bounded import Array
from harp.data.formats.images import Centre
from harp.data.streaming.images import Streamed
from harp.errors import DataError
from harp.evaluation.score import accuracy, subset
from harp.system.progress import Quiet

SEVERITIES = (1, 2, 3, 4, 5)

KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The kinds that published means are over. Folders may have four more, which are meant for validation."""


@dataclass(frozen=True)
class Corruption:
    """The test images with one kind of corruption at one severity, read from their files by `load`."""

    kind: str
    severity: int
    load: Callable[[], Split]
    digest: str  # of the bytes of an .npy file, or of the names and sizes of image files


@dataclass(frozen=True)
class Corruptions:
    """The corrupted test images in a folder."""

    name: str  # of the folder
    parts: list[Corruption]

    @property
    def missing(self) -> list[str]:
        """The kinds that are not in the folder."""
        return [kind for kind in KINDS if all(part.kind != kind for part in self.parts)]

    def digest(self) -> str:
        """A digest of all of them."""
        texts = (f"{part.kind}/{part.severity}/{part.digest};" for part in self.parts)
        return hashlib.blake2b("".join(texts).encode(), digest_size=16).hexdigest()


def find(folder: Path, data: DataSet) -> Corruptions:
    """The corrupted test images of a data set in a folder."""
    name = folder.resolve().name
    kinds = [kind for kind in KINDS if (folder / f"{kind}.npy").is_file()]
    if kinds:
        labels = _labels(folder / "labels.npy", data)
        return Corruptions(name, [part for kind in kinds for part in _in_array(folder / f"{kind}.npy", labels, data)])
    kinds = [kind for kind in KINDS if (folder / kind).is_dir()]
    if not kinds:
        raise DataError(
            f"{folder}: no corrupted images, expected the files of CIFAR-10-C or CIFAR-100-C ({KINDS[0]}.npy, ..., "
            f"labels.npy) or the folders of ImageNet-C ({KINDS[0]}/1/CLASS/*.JPEG)"
        )
    return Corruptions(name, [_in_folders(folder, kind, severity, data) for kind in kinds for severity in SEVERITIES])


def measure_all(
    model: nn.Module,
    corruptions: Corruptions,
    examples: int | None,
    *,
    seed: int,
    batch: int,
    progress: Callable[[float, int, str], None] = lambda done, total, text: None,
) -> dict[str, Any]:
    """The accuracy for each kind and severity with its 95 % interval, and the mean of all.

    `examples` images are drawn by the seed, the same at every severity; None: all. `progress` counts the corruptions.
    """
    rows: list[dict[str, Any]] = []
    for done, part in enumerate(corruptions.parts, start=1):
        split = part.load()
        split = split.select(subset(len(split), examples, seed))
        score = accuracy(model, split.images, split.labels, batch=batch, seed=seed, progress=lambda done, total: None)
        low, high = score.interval()
        key = {"corruption": part.kind, "severity": part.severity}
        rows.append({**key, "value": score.accuracy, "low": low, "high": high, "n": score.n})
        progress(done, len(corruptions.parts), f"{part.kind} {part.severity}")
    mean, protocol = fmean(row["value"] for row in rows), {"seed": seed, "batch": batch}
    return {"files": corruptions.name, "rows": rows, "mean": mean, "missing": corruptions.missing, **protocol}


def _array(path: Path) -> Array:
    """The array in an .npy file, mapped into memory: its size must be that of the file."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy's header parser raises nearly anything on damaged bytes
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{path}: can't be read ({reason}), expected an .npy file of numbers") from error


def _labels(path: Path, data: DataSet) -> torch.Tensor:
    """The labels of the test images, which must be those in the file at every severity."""
    array, labels = _array(path), data.test.labels.cpu()
    shape = (len(SEVERITIES) * len(labels),)
    if array.dtype.kind not in "iu" or array.shape != shape:
        raise DataError(f"{path}: {array.dtype} {array.shape}, expected integers {shape}: {data.name} has other images")
    if not np.array_equal(array.reshape(len(SEVERITIES), -1), np.broadcast_to(labels.numpy(), (5, len(labels)))):
        raise DataError(f"{path}: other labels than those of the test images of {data.name}, expected the same")
    return labels


def _in_array(path: Path, labels: torch.Tensor, data: DataSet) -> Iterator[Corruption]:
    """The five severities in one file of CIFAR-10-C or CIFAR-100-C."""
    array, (channels, height, width) = _array(path), data.shape
    shape = (len(SEVERITIES) * len(labels), height, width, channels)
    if array.dtype != np.uint8 or array.shape != shape:
        raise DataError(f"{path}: {array.dtype} {array.shape}, expected uint8 {shape} for {data.name}")

    def load(severity: int) -> Split:
        images = array[(severity - 1) * len(labels) : severity * len(labels)]
        return Split(torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), labels)

    content = hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()
    for severity in SEVERITIES:
        yield Corruption(path.stem, severity, partial(load, severity), content)


def _in_folders(folder: Path, kind: str, severity: int, data: DataSet) -> Corruption:
    """One severity in a folder of ImageNet-C; its images are decoded when they are used."""
    part = f"{kind}/{severity}"
    if not (folder / part).is_dir():
        raise DataError(f"{folder / part}: no such folder, expected the severities 1 to 5 of {kind}")
    files = files_by_class(folder, part, Quiet())
    if len(files) != data.num_classes:
        raise DataError(f"{folder / part}: {len(files)} class folders, expected the {data.num_classes} of {data.name}")
    encoded = joined(folder, part, files, sorted(files))
    images = Streamed(encoded, Centre(data.shape[1]))
    return Corruption(kind, severity, lambda: Split(images, torch.from_numpy(encoded.labels)), images.digest())
