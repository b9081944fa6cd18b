"""An index of the images in archives, kept in a file so that the archives are scanned only once.

FOLDER/.harp-index-<hash>.npz     or, where that can't be written, a file in the user's cache folder
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harp.data.formats.bounded import Array, Integers
from harp.data.formats.byte_ranges import EncodedImages, Names
from harp.data.formats.npz import read_npz
from harp.errors import CheckpointError, DataError
from harp.system import files

logger = logging.getLogger("harp")

_VERSION = 1
LARGEST_LABEL = (1 << 20) - 1
"""Every class up to the largest label gets a name."""

_COLUMNS = ("held", "offsets", "sizes", "labels")


class Entry(NamedTuple):
    """An image in an archive: its name, the number of the archive, its position and size there, and its label."""

    name: str
    archive: int
    offset: int
    size: int
    label: int


def indexed(archives: Sequence[Path], scan: Callable[[], Iterable[Entry]]) -> EncodedImages:
    """The images in the archives of one folder.

    From the index file if it was made of these very archives; otherwise by `scan`, which is then kept.
    """
    stats = [(path.name, path.stat()) for path in archives]
    stamp = json.dumps([_VERSION, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)])
    sizes = np.array([stat.st_size for _, stat in stats], np.int64)
    folder, names = archives[0].parent, tuple(path.name for path in archives)
    name = f"index-{_hash(json.dumps(names).encode())}.npz"
    paths = folder / f".harp-{name}", files.user_cache() / _hash(os.fsencode(folder.resolve())) / name
    arrays = next((kept for path in paths if (kept := _read(path, stamp, sizes)) is not None), None)
    if arrays is None:
        arrays = _arrays(scan())
        _write(paths, {"stamp": np.frombuffer(stamp.encode(), np.uint8), **arrays})
    packed, labels = Names(arrays["letters"], arrays["ends"]), np.array(arrays["labels"])
    return EncodedImages(str(folder), packed, arrays["sizes"], labels, names, arrays["held"], arrays["offsets"])


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _arrays(entries: Iterable[Entry]) -> dict[str, Array]:
    rows = list(entries)
    names = Names.of(entry.name for entry in rows)
    table = np.array([entry[1:] for entry in rows], np.int64).reshape(-1, len(_COLUMNS))
    columns = {key: np.ascontiguousarray(column) for key, column in zip(_COLUMNS, table.T, strict=True)}
    return {"letters": names.letters, "ends": names.ends, **columns}


def _write(paths: Sequence[Path], arrays: dict[str, Array]) -> None:
    """Write to the first path that can be written."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # the stub takes the names for its option
    for path in paths:
        try:
            files.write_bytes(path, buffer.getvalue())
            return
        except CheckpointError as error:
            logger.debug("no index kept: %s", error)


def _read(path: Path, stamp: str, archive_sizes: Integers) -> dict[str, Array] | None:
    """The arrays of an index file, if they are consistent and belong to these archives."""
    try:
        arrays = read_npz(path, ("stamp", "letters", "ends", *_COLUMNS))
    except DataError as error:
        logger.debug("no index: %s", error)
        return None
    ends, letters = arrays["ends"], arrays["letters"]
    held, offsets, sizes, labels = (arrays[key] for key in _COLUMNS)
    valid = (
        arrays["stamp"].tobytes() == stamp.encode()
        and letters.dtype == np.uint8
        and all(arrays[key].shape == (len(ends),) and arrays[key].dtype == np.int64 for key in ("ends", *_COLUMNS))
        and (not len(ends) or ends[-1] == len(letters))
        and bool(np.all(np.diff(ends, prepend=0) >= 0))
        and bool(np.all((held >= 0) & (held < len(archive_sizes)) & (offsets >= 0) & (sizes >= 0)))
        and bool(np.all(sizes <= archive_sizes[held] - offsets))
        and bool(np.all((labels >= 0) & (labels <= LARGEST_LABEL)))
    )
    return arrays if valid else None
