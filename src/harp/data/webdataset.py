"""Writing shards: a folder of images as tar archives in the WebDataset format, which the data set `shards` reads.

    OUT/shards.json classes.txt train-000000.tar ... test-000000.tar ...

The same images and options give the same bytes. A shard appears when it is complete, so an interrupted command
continues with the first shard that is missing.
"""

import hashlib
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harp.data.datasets.image_folder import list_image_folder
from harp.data.formats.byte_ranges import Place, read_place
from harp.data.formats.images import decode_image, pillow, strict_warnings
from harp.errors import DataError, RecipeError
from harp.system import files
from harp.system.progress import Quiet
from harp.system.seeds import derive

logger = logging.getLogger("harp")

_QUALITY = 95  # of JPEG images that are made smaller
_COPIED = {".jpg": "jpg", ".jpeg": "jpeg", ".png": "png", ".webp": "webp"}  # other formats become png


class Written(NamedTuple):
    """The numbers of images and shards, and the images that were left out because they can't be decoded."""

    images: int
    shards: int
    undecodable: list[str]


class _Row(NamedTuple):
    """An image of a split: its number, its place and its label."""

    number: int
    place: Place
    label: int


def write_shards(
    folder: Path, out: Path, *, count: int = 1000, size: int | None = None, display: Quiet | None = None
) -> Written:
    """Write the images of a folder (train/<class>/ and test/<class>/) as shards of `count` images.

    With a `size`, images whose shorter side is longer are resized to it without cropping. All others are copied byte by
    byte. Training images are shuffled, for readers that read a shard from its beginning.
    """
    if count < 1 or (size is not None and size < 1):
        raise RecipeError(f"count {count}, size {size}: give at least 1")
    display = display or Quiet()
    listing = list_image_folder(folder, display)
    options: dict[str, Any] = {"count": count, "format": 1, "size": size}
    if size is not None:
        options["quality"] = _QUALITY
    text = json.dumps([listing.train.digest(), listing.test.digest(), listing.classes])
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    _claim(out, {"digest": digest, **options})
    files.write_text(out / "classes.txt", "".join(f"{name}\n" for name in listing.classes))
    left_out: list[str] = []
    shards, done, total = 0, 0, len(listing.train) + len(listing.test)
    with display.counting("shards", total):
        for part, images in (("train", listing.train), ("test", listing.test)):
            for number, chosen in enumerate(_chunks(part, len(images), count)):
                path = out / f"{part}-{number:06d}.tar"
                rows = [_Row(row, images.place(row), int(images.labels[row])) for row in chosen]
                left_out += _missing(path, rows) if path.exists() else _write(path, rows, size)
                shards, done = shards + 1, done + len(rows)
                display.count(done, total, path.name)
    return Written(total - len(left_out), shards, left_out)


def _chunks(part: str, images: int, count: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(derive(0, "shards", part))
    order = torch.randperm(images, generator=generator) if part == "train" else torch.arange(images)
    for start in range(0, images, count):
        yield order[start : start + count].tolist()


def _claim(out: Path, facts: dict[str, Any]) -> None:
    """Write shards.json, which describes the shards; refuse a folder that has other shards."""
    path = out / "shards.json"
    if path.is_file():
        try:
            existing = json.loads(path.read_text("utf-8"))
        except ValueError:
            existing = None
        if existing != facts:
            raise DataError(f"{out} has shards of other images or options, expected an empty folder or the same again")
    elif any(out.glob("*.tar")):
        raise DataError(f"{out} has archives already, expected an empty folder")
    else:
        files.write_json(path, facts)


def _write(path: Path, rows: Sequence[_Row], size: int | None) -> list[str]:
    """Write one shard; returns the reasons why images were left out."""
    with strict_warnings(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        results = list(pool.map(lambda row: _encode(row.place, size), rows))
    left_out = [result for result in results if isinstance(result, str)]
    for reason in left_out:
        logger.warning("%s; left out", reason)
    with files.atomic(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
        for row, result in zip(rows, results, strict=True):
            if not isinstance(result, str):
                suffix, data = result
                _add(archive, f"{row.number:08d}.{suffix}", data)
                _add(archive, f"{row.number:08d}.cls", str(row.label).encode())
    return left_out


def _missing(path: Path, rows: Sequence[_Row]) -> list[str]:
    """The images that were left out of a finished shard."""
    try:
        with tarfile.open(path) as archive:
            present = {name.partition(".")[0] for name in archive.getnames()}
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path}: no readable archive ({files.reason(error)}), expected a shard: delete it") from error
    return [f"{row.place.name}: left out before" for row in rows if f"{row.number:08d}" not in present]


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # with the default time, owner and mode: the same everywhere
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _encode(place: Place, size: int | None) -> tuple[str, bytes] | str:
    """The suffix and the bytes of an image in a shard, or the reason why it can't be decoded."""
    suffix = os.path.splitext(place.path)[1].lower()
    try:
        data = read_place(place)
        if size is None and suffix in _COPIED:
            return _COPIED[suffix], data
        image = decode_image(data, place.name)
    except DataError as error:
        return str(error)
    if size is not None and min(image.size) > size:
        width, height = (max(1, round(side * size / min(image.size))) for side in image.size)
        image = image.resize((width, height), pillow().Resampling.BILINEAR)
    elif suffix in _COPIED:
        return _COPIED[suffix], data
    buffer = io.BytesIO()
    jpeg = suffix in (".jpg", ".jpeg")
    image.save(buffer, "JPEG" if jpeg else "PNG", **({"quality": _QUALITY} if jpeg else {}))
    return ("jpg" if jpeg else "png"), buffer.getvalue()
