"""Writing shards: a folder of images as tar archives in the WebDataset format, which `shards` reads.

    OUT/shards.json classes.txt train-000000.tar ... test-000000.tar ...

The same images and options give the same bytes. A shard appears when it is whole, so what was interrupted goes on with
the first that is missing.
"""

import hashlib
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harp.data.formats import Extents, Integers, Place, careful, list_image_folder, pillow, read_place, upright
from harp.errors import DataError, RecipeError
from harp.system import files
from harp.system.progress import Quiet
from harp.system.seeds import derive

logger = logging.getLogger("harp")

QUALITY = 95
"""Of JPEG images that are made smaller."""

_KEPT = {".jpg": "jpg", ".jpeg": "jpeg", ".png": "png", ".webp": "webp"}  # others become png


@dataclass(frozen=True)
class Written:
    """How many images and shards there are now, and which images were left out as they can't be decoded."""

    images: int
    shards: int
    undecodable: list[str]


def write_shards(
    folder: Path, out: Path, *, count: int = 1000, size: int | None = None, display: Quiet | None = None
) -> Written:
    """Write the images of a folder (train/<class>/ and test/<class>/) as shards of `count` images.

    With a `size` images whose shorter side is longer are resized to it, whole. All others are copied byte by byte.
    Training images are shuffled, for readers that go through a shard from its beginning.
    """
    if count < 1 or (size is not None and size < 1):
        raise RecipeError(f"count {count}, size {size}: give at least 1")
    display = display or Quiet()
    with display.counting(f"list {folder.name}", 1):
        found = list_image_folder(folder, display.count)
    encoder = _Encoder(size)
    _claim(out, {"digest": _digest(found.train, found.test, found.classes), "count": count, **encoder.facts()})
    files.write_text(out / "classes.txt", "".join(f"{name}\n" for name in found.classes))
    left_out: list[str] = []
    shards, done, total = 0, 0, len(found.train) + len(found.test)
    with display.counting("shards", total):
        for part, extents, labels in (
            ("train", found.train, found.train_labels),
            ("test", found.test, found.test_labels),
        ):
            for number, rows in enumerate(_rows(part, len(extents), count)):
                path = out / f"{part}-{number:06d}.tar"
                if path.exists():
                    left_out += [f"{extents.place(row).name}: left out before" for row in _missing(path, rows)]
                else:
                    left_out += _write(path, [extents.place(row) for row in rows], rows, labels, encoder)
                shards, done = shards + 1, done + len(rows)
                display.count(done, total, path.name)
    return Written(total - len(left_out), shards, left_out)


def _rows(part: str, images: int, count: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(derive(0, "shards", part))
    order = torch.randperm(images, generator=generator) if part == "train" else torch.arange(images)
    for start in range(0, images, count):
        yield order[start : start + count].tolist()


def _digest(train: Extents, test: Extents, classes: Sequence[str]) -> str:
    text = json.dumps([train.digest(), test.digest(), list(classes)])
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _claim(out: Path, facts: dict[str, Any]) -> None:
    """Take a folder for these shards; one that has others is left alone."""
    path = out / "shards.json"
    if path.is_file():
        try:
            known = json.loads(path.read_text("utf-8"))
        except ValueError:
            known = None
        if known != facts:
            raise DataError(f"{out} has shards of other images or options, expected an empty folder or the same again")
    elif any(out.glob("*.tar")):
        raise DataError(f"{out} has archives already, expected an empty folder")
    else:
        files.write_json(path, facts)


def _write(path: Path, places: list[Place], rows: list[int], labels: Integers, encoder: "_Encoder") -> list[str]:
    """Write one shard; return what could not be decoded."""
    with careful(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        encoded = list(pool.map(encoder, places))
    left_out = [item for item in encoded if isinstance(item, str)]
    for reason in left_out:
        logger.warning("%s; left out", reason)
    with files.atomic(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
        for row, item in zip(rows, encoded, strict=True):
            if not isinstance(item, str):
                _add(archive, f"{row:08d}.{item[0]}", item[1])
                _add(archive, f"{row:08d}.cls", str(int(labels[row])).encode())
    return left_out


def _missing(path: Path, rows: list[int]) -> list[int]:
    """Which of the images a finished shard does not have."""
    try:
        with tarfile.open(path) as archive:
            there = {name.partition(".")[0] for name in archive.getnames()}
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path}: no readable archive ({files.reason(error)}), expected a shard: delete it") from error
    return [row for row in rows if f"{row:08d}" not in there]


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # time, owner and mode are its defaults: the same everywhere
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


class _Encoder:
    """An image as a shard holds it: the ending and the bytes, or why it can't be decoded."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def facts(self) -> dict[str, Any]:
        """What the bytes depend on beside the images."""
        facts: dict[str, Any] = {"format": 1, "size": self.size}
        return facts if self.size is None else {**facts, "quality": QUALITY}

    def __call__(self, place: Place) -> tuple[str, bytes] | str:
        ending = os.path.splitext(place.path)[1].lower()
        try:
            data = read_place(place)
            if self.size is None and ending in _KEPT:
                return _KEPT[ending], data
            image = upright(data, place.name)
        except DataError as error:
            return str(error)
        if ending in _KEPT and (self.size is None or min(image.size) <= self.size):
            return _KEPT[ending], data
        return self._encoded(image, jpeg=ending in (".jpg", ".jpeg"))

    def _encoded(self, image: Any, *, jpeg: bool) -> tuple[str, bytes]:
        buffer = io.BytesIO()
        if self.size is not None and min(image.size) > self.size:
            width, height = (max(1, round(side * self.size / min(image.size))) for side in image.size)
            image = image.resize((width, height), pillow().Resampling.BILINEAR)
        if jpeg:
            image.save(buffer, "JPEG", quality=QUALITY)
        else:
            image.save(buffer, "PNG")
        return ("jpg" if jpeg else "png"), buffer.getvalue()
