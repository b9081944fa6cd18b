"""Shards in the WebDataset format: tar archives whose members key.jpg and key.cls, or key.json, are an image's.

Images are read in place, in any order. Where they are is found by one pass over the archives' headers.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harp.data.datasets.base import UNKNOWN, Encoded, Found
from harp.data.datasets.index import Entries, Index, indexed
from harp.data.formats import Integers, Member, TarIndex
from harp.errors import DataError
from harp.system.progress import Quiet

IMAGES = frozenset(("jpg", "jpeg", "png", "webp"))
"""What the members with images end in."""

_PART = re.compile(r"(?:.*[-_.])?(train|test|val|validation)(?:[-_.]?\d[-_.\w]*)?\.tar")
_MOST_LABEL = 1 << 20  # bytes of a .cls or .json


@dataclass(frozen=True)
class Shards(Encoded):
    """Archives such as train-000000.tar and val-000000.tar, and classes.txt if the classes have names."""

    def find(self, folder: Path, display: Quiet) -> Found:
        """Index the shards, or take the index that is kept."""
        parts = _parts(folder)
        held = next((parts[name] for name in ("test", "val", "validation") if parts.get(name)), [])
        if not parts.get("train") or not held:
            raise DataError(f"{self.name}: no train-*.tar and test-*.tar in {folder}, expected {self.files}")
        train, test = (self._index(archives, display) for archives in (parts["train"], held))
        classes = _classes(folder, train.labels, test.labels)
        source = f"{folder}; {UNKNOWN}"
        return Found(train.extents(parts["train"]), train.labels, test.extents(held), test.labels, classes, source)

    def _index(self, archives: Sequence[Path], display: Quiet) -> Index:
        def build() -> Index:
            entries = Entries()
            with display.counting(f"index {archives[0].name}", len(archives)):
                for number, path in enumerate(archives):
                    for name, offset, size, label in _samples(TarIndex(path)):
                        entries.add(name, number, offset, size, label)
                    display.count(number + 1, len(archives))
            return entries.index()

        return indexed(archives, build)


def _parts(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.tar")):
        if match := _PART.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
    return found


def _samples(archive: TarIndex) -> Iterator[tuple[str, int, int, int]]:
    """Name, offset, size and label of each image; the members of one image stand together."""
    key, image, label = "", None, None
    for member in archive:
        folder, _, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        if not stem:
            continue  # hidden, such as what macOS leaves in archives
        if (this := f"{folder}/{stem}") != key:
            yield from _sample(archive, key, image, label)
            key, image, label = this, None, None
        ending = ending.lower()
        if ending in IMAGES and image is not None:
            raise DataError(f"{archive.name}: {image.name} and {member.name}, expected one image a key")
        if ending in IMAGES:
            image = member
        elif ending in ("cls", "json") and label is None:
            label = _label(archive, member, ending)
    yield from _sample(archive, key, image, label)


def _sample(
    archive: TarIndex, key: str, image: Member | None, label: int | None
) -> Iterator[tuple[str, int, int, int]]:
    if image is None and label is None:
        return
    if image is None or label is None:
        lacks = "no label" if label is None else "no image"
        raise DataError(f"{archive.name}: {lacks} for {key.strip('/')}, expected its .jpg and its .cls or .json")
    yield image.name, image.offset, image.size, label


def _label(archive: TarIndex, member: Member, ending: str) -> int | None:
    """The label in a .cls or .json; a .json without one says other things of the image."""
    data = archive.read(member) if member.size <= _MOST_LABEL else b""
    value = None
    with suppress(ValueError, RecursionError):
        value = json.loads(data) if ending == "json" else int(data)
    if ending == "json":
        value = value.get("label") if isinstance(value, dict) else None
        if value is None:
            return None
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise DataError(f"{archive.name}/{member.name}: {data[:20]!r}, expected a label from 0 up")
    return value


def _classes(folder: Path, *labels: Integers) -> tuple[str, ...]:
    """From classes.txt, a name a line; else the labels are the names."""
    path = folder / "classes.txt"
    if path.is_file():
        return tuple(line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip())
    return tuple(str(label) for label in range(1 + max(int(each.max(initial=0)) for each in labels)))
