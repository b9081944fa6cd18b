"""Shards in the WebDataset format: tar archives with the members key.jpg and key.cls, or key.json, for each image.

Images are read in any order, without extracting them. One scan of the archives finds where they are.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from harp.data.datasets.base import UNKNOWN, Encoded, Listing, contents
from harp.data.datasets.index import LARGEST_LABEL, Entry, indexed
from harp.data.formats.bounded import Integers
from harp.data.formats.tar import Member, TarIndex
from harp.errors import DataError
from harp.system.progress import Quiet

_SUFFIXES = frozenset(("jpg", "jpeg", "png", "webp"))  # of members that are images
_PART = re.compile(r"(?:.*[-_.])?(train|test|val|validation)(?:[-_.]?\d[-_.\w]*)?\.tar")
_LARGEST_FILE = 1 << 20  # bytes of a .cls or .json


class Shards(Encoded):
    """Archives such as train-000000.tar and val-000000.tar, and classes.txt if the classes have names."""

    def find(self, folder: Path, display: Quiet) -> Listing:
        """Read the index of the shards, or create it."""
        parts: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("*.tar")):
            if match := _PART.fullmatch(path.name):
                parts.setdefault(match[1], []).append(path)
        tests = next((parts[name] for name in ("test", "val", "validation") if name in parts), None)
        if "train" not in parts or tests is None:
            raise DataError(
                f"{self.name}: no train-*.tar and test-*.tar in {folder}, expected {self.files}; {contents(folder)}"
            )
        train = indexed(parts["train"], lambda: _scan(parts["train"], display))
        test = indexed(tests, lambda: _scan(tests, display))
        return Listing(train, test, _classes(folder, train.labels, test.labels), f"{folder}; {UNKNOWN}")


def _scan(archives: Sequence[Path], display: Quiet) -> Iterator[Entry]:
    with display.counting(f"index {archives[0].name}", len(archives)):
        for number, path in enumerate(archives):
            archive = TarIndex(path)
            visible = (member for member in archive if _key(member))
            for key, members in groupby(visible, _key):  # the members of an image are next to each other
                yield from _entry(archive, number, key, members)
            display.count(number + 1, len(archives))


def _key(member: Member) -> str:
    """The name of a member without its suffix; empty for hidden files, which macOS leaves in archives."""
    folder, _, file = member.name.rpartition("/")
    stem = file.partition(".")[0]
    return f"{folder}/{stem}" if stem else ""


def _entry(archive: TarIndex, number: int, key: str, members: Iterator[Member]) -> Iterator[Entry]:
    """The image and the label among the members with one key; no entry if there is neither."""
    image, label = None, None
    for member in members:
        suffix = member.name.rpartition("/")[2].partition(".")[2].lower()
        if suffix in _SUFFIXES:
            if image is not None:
                raise DataError(f"{archive.name}: {image.name} and {member.name}, expected one image a key")
            image = member
        elif suffix in ("cls", "json") and label is None:
            label = _label(archive, member, suffix)
    if image is not None and label is not None:
        yield Entry(image.name, number, image.offset, image.size, label)
    elif image is not None or label is not None:
        lacking = "no label" if label is None else "no image"
        raise DataError(f"{archive.name}: {lacking} for {key.strip('/')}, expected its .jpg and its .cls or .json")


def _label(archive: TarIndex, member: Member, suffix: str) -> int | None:
    """The label in a .cls or .json file; a .json file without one has other facts about the image."""
    data = archive.read(member) if member.size <= _LARGEST_FILE else b""
    value = None
    with suppress(ValueError, RecursionError):
        value = json.loads(data) if suffix == "json" else int(data)
    if suffix == "json":
        value = value.get("label") if isinstance(value, dict) else None
        if value is None:
            return None
    if type(value) is not int or not 0 <= value <= LARGEST_LABEL:
        raise DataError(f"{archive.name}/{member.name}: {data[:20]!r}, expected a label from 0 up to {LARGEST_LABEL:,}")
    return value


def _classes(folder: Path, *labels: Integers) -> tuple[str, ...]:
    """From classes.txt, one name a line; otherwise the labels are the names."""
    path = folder / "classes.txt"
    if path.is_file():
        return tuple(line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip())
    return tuple(str(label) for label in range(1 + max(int(part.max(initial=0)) for part in labels)))
