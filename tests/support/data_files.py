"""Files of the data sets, as their makers publish them."""

import io
import pickle
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 3072), dtype=np.uint8)
LABELS = [3, 0, 9, 1, 7]


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape) + array.tobytes()


def element(kind: int, data: bytes, order: str, small: bool = False) -> bytes:
    if small:
        return struct.pack(f"{order}I", len(data) << 16 | kind) + data.ljust(4, b"\0")
    return struct.pack(f"{order}2I", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def matrix(name: str, array: np.ndarray, klass: int, stored: int, order: str) -> bytes:
    flags = element(6, struct.pack(f"{order}2I", klass, 0), order)
    sizes = element(5, struct.pack(f"{order}{array.ndim}i", *array.shape), order)
    body = flags + sizes + element(1, name.encode(), order, small=True)
    return element(14, body + element(stored, array.tobytes(order="F"), order), order)


def mat5(elements: list[bytes], order: str = "<", compress: bool = False) -> bytes:
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(f"{order}2H", 0x0100, 0x4D49)
    if compress:
        packed = [zlib.compress(part) for part in elements]
        elements = [struct.pack(f"{order}2I", 15, len(part)) + part for part in packed]
    return header + b"".join(elements)


def svhn(order: str = "<", compress: bool = False) -> tuple[bytes, np.ndarray, np.ndarray]:
    x = RNG.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    y = np.array([[1.0], [10.0], [3.0], [9.0]])
    # y as MATLAB writes it: of class double (6), stored as bytes because the values fit.
    parts = [matrix("X", x, 9, 2, order), matrix("y", y.astype(np.uint8), 6, 2, order)]
    return mat5(parts, order, compress), x, y


def cifar(protocol: int = 2, **changes: object) -> bytes:
    return pickle.dumps({b"data": IMAGES, b"labels": LABELS, b"batch_label": b"", **changes}, protocol)


def binary(label_bytes: int = 1) -> bytes:
    return b"".join(bytes([17] * (label_bytes - 1) + [y]) + x.tobytes() for x, y in zip(IMAGES, LABELS, strict=True))


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def paint(path: Path, width: int, height: int, colour: tuple[int, int, int] = (10, 20, 30)) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", (width, height), colour).save(path)


def png(width: int, height: int, colour: tuple[int, int, int] = (10, 20, 30)) -> bytes:
    stream = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (width, height), colour).save(stream, "PNG")
    return stream.getvalue()


def save_to_disk(folder: Path, images: list[bytes], classes: list[str]) -> None:
    """A data set as Hugging Face's library saves it; the classes take turns."""
    library = pytest.importorskip("datasets", reason="needs the extra huggingface")
    features = library.Features({"image": library.Image(), "label": library.ClassLabel(names=classes)})
    labels = [number % len(classes) for number in range(len(images))]
    columns = {"image": [{"bytes": data, "path": None} for data in images], "label": labels}
    arrow = pytest.importorskip("pyarrow")
    library.Dataset(arrow.table(columns, schema=features.arrow_schema), fingerprint="made").save_to_disk(str(folder))
