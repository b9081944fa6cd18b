"""An index of archives: where their images are, kept in a file so that headers are read once.

FOLDER/.harp-index-<hash>.npz     or, where that can't be written, the same in the user's cache folder
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harp.data.formats import Extents, Integers, Names
from harp.errors import CheckpointError
from harp.system import files

logger = logging.getLogger("harp")

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Index:
    """The images of some archives: names, which archive, where in it, how many bytes, and their labels."""

    names: Names
    held: Integers
    offsets: Integers
    sizes: Integers
    labels: Integers

    def extents(self, archives: Sequence[Path]) -> Extents:
        """Where the images are."""
        root = str(archives[0].parent)
        return Extents(root, self.names, self.sizes, tuple(path.name for path in archives), self.held, self.offsets)


class Entries:
    """Collects the entries of an index."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[tuple[int, int, int, int]] = []

    def add(self, name: str, archive: int, offset: int, size: int, label: int) -> None:
        """One image."""
        self.names.append(name)
        self.rows.append((archive, offset, size, label))

    def index(self) -> Index:
        """All of them."""
        table = np.array(self.rows, np.int64).reshape(-1, 4)
        held, offsets, sizes, labels = (np.ascontiguousarray(column) for column in table.T)
        return Index(Names.of(self.names), held, offsets, sizes, labels)


def indexed(archives: Sequence[Path], build: Callable[[], Index]) -> Index:
    """The index of archives in one folder, from its file if that is newer than every archive, else built and kept."""
    stats = [path.stat() for path in archives]
    stamp = json.dumps([_VERSION, *([p.name, s.st_size, s.st_mtime_ns] for p, s in zip(archives, stats, strict=True))])
    digest = hashlib.blake2b(json.dumps([path.name for path in archives]).encode(), digest_size=8).hexdigest()
    name = f"index-{digest}.npz"
    where = hashlib.blake2b(os.fsencode(archives[0].parent.resolve()), digest_size=8).hexdigest()
    places = archives[0].parent / f".harp-{name}", user_cache() / where / name
    sizes = np.array([stat.st_size for stat in stats], np.int64)
    for place in places:
        if (known := _read(place, stamp, sizes)) is not None:
            return known
    made = build()
    for place in places:
        try:
            files.write_bytes(place, _bytes(made, stamp))
            break
        except CheckpointError as error:
            logger.debug("no index kept: %s", error)
    return made


def user_cache() -> Path:
    """The folder for what can be made again; one that can't be written if the user has no home folder."""
    home = os.path.expanduser("~")  # "~" if there is none, which must not become a folder of that name
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.devnull if home == "~" else home, ".cache")
    return Path(base) / "harp"


def _bytes(index: Index, stamp: str) -> bytes:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        stamp=np.frombuffer(stamp.encode(), np.uint8),
        letters=index.names.letters,
        ends=index.names.ends,
        held=index.held,
        offsets=index.offsets,
        sizes=index.sizes,
        labels=index.labels,
    )
    return buffer.getvalue()


def _read(path: Path, stamp: str, archive_sizes: Integers) -> Index | None:
    """The index in a file, if it is one of these very archives."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if arrays["stamp"].tobytes().decode() != stamp:
                return None
            letters, ends = arrays["letters"], arrays["ends"]
            held, offsets, sizes, labels = (arrays[key] for key in ("held", "offsets", "sizes", "labels"))
            whole = len(ends) == 0 or (ends[-1] == len(letters) and np.all(np.diff(ends, prepend=0) >= 0))
            fits = all(
                array.shape == ends.shape and array.dtype == np.int64 for array in (held, offsets, sizes, labels)
            )
            if not whole or not fits or np.any((held < 0) | (held >= len(archive_sizes))):
                return None
            if np.any((offsets < 0) | (sizes < 0) | (offsets + sizes > archive_sizes[held])):
                return None
            return Index(Names(letters, ends), held, offsets, sizes, labels)
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged in whatever way: it is made anew
        logger.debug("index %s can't be read: %s", path, error)
        return None
