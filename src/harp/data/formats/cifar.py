"""CIFAR-10 and CIFAR-100: the batches of the python version, and the records of the binary version."""

import numpy as np

from harp.data.formats.bounded import Array, Bytes, File, Integers, first_line, read_file
from harp.data.formats.safe_pickle import PickledArray, as_text, unpickle
from harp.errors import DataError

PIXELS = 3 * 32 * 32
"""Pixel bytes of one CIFAR record: the red, the green and the blue plane."""


def read_cifar_batch(path: File) -> tuple[Bytes, Integers]:
    """Read a python batch of CIFAR-10, or CIFAR-100 (fine labels): images [N, 3, 32, 32] and labels [N].

    A pickle that names a function other than the few of numpy's own pickles is refused.
    """
    expected = "a CIFAR batch pickle"
    payload = read_file(path, expected)
    name, batch = payload.name, unpickle(payload, expected)
    if not isinstance(batch, dict):
        raise DataError(f"{name}: holds a {type(batch).__name__}, expected a dict with data and labels")
    entries = {as_text(key): value for key, value in batch.items() if isinstance(key, bytes | str)}
    try:
        images = _plain_array(entries.get("data"))
        labels = _plain_array(entries.get("fine_labels", entries.get("labels")))
    except ValueError as error:
        raise DataError(f"{name}: {first_line(error)}, expected uint8 data and integer labels") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != PIXELS or not len(images):
        raise DataError(f"{name}: data is {images.dtype} {images.shape}, expected uint8 (N, {PIXELS})")
    if labels.shape != images.shape[:1]:
        raise DataError(f"{name}: labels of shape {labels.shape}, expected one for each of {len(images):,} images")
    return np.ascontiguousarray(images).reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _plain_array(value: object) -> Array:
    """The array that an entry of a batch stands for."""
    if isinstance(value, PickledArray):
        return value.array()
    if isinstance(value, list) and all(type(item) is int and abs(item) < 1 << 31 for item in value):
        return np.array(value, np.int64)
    raise ValueError("data or labels are missing" if value is None else f"a {type(value).__name__} in the batch")


def read_cifar_binary(path: File, label_bytes: int) -> tuple[Bytes, Integers]:
    """Read a file of the binary version: images [N, 3, 32, 32] and labels [N].

    A record has `label_bytes` (1 for CIFAR-10; 2 for CIFAR-100, coarse then fine: the last one is kept) and
    3,072 pixel bytes.
    """
    record = label_bytes + PIXELS
    name, data = read_file(path, "a CIFAR binary batch")
    if not data or len(data) % record:
        published = f"{10_000 * record:,} for 10,000 images"
        raise DataError(f"{name}: {len(data):,} bytes, expected a multiple of {record:,} ({published})")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    images = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return images, records[:, label_bytes - 1].astype(np.int64)
