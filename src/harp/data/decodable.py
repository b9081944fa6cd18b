"""Images that can't be decoded: a training replaces them by others and counts them, an evaluation leaves them out.

An evaluation checks all images in advance. The result is cached in the user's cache folder, by the names and sizes of
the files.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from harp.data.dataset import Split
from harp.data.formats.images import Centre
from harp.data.streaming.images import Streamed
from harp.data.streaming.workers import Decoder, Job, Loader, default_workers
from harp.errors import CheckpointError, DataError
from harp.system import files

logger = logging.getLogger("harp")

SHARE = 0.001
"""The share of undecodable images that a training accepts by default."""

_FEW = 10  # undecodable images that are always accepted, unless the share is 0
_CHUNK = 64  # images per job
_WORTH_WORKERS = 2000  # images from which starting worker processes, a few seconds, pays off
known: dict[str, Tensor] = {}  # the positions of the decodable images, by the digest of a split

Progress = Callable[[float, int, str], None]


class Corrupt:
    """Counts the undecodable images of a training.

    Arguments:
        images: the number of all images.
        share: the share of images that may be undecodable, or a number of images from 1 up.
        path: a file that gets a line for each undecodable image. Several processes may append to it. The lines of an
            interrupted training count, and are not reported again.
    """

    def __init__(self, images: int, share: float = SHARE, path: Path | None = None) -> None:
        self.images, self.path = images, path
        self.limit = int(share) if share >= 1 or share == 0 else max(_FEW, int(share * images))
        self.reasons: list[str] = self._lines()
        self._write_failed = False

    def add(self, reason: str) -> None:
        """Add an image; raises `DataError` when there are more than the limit."""
        if reason in self.reasons:
            return
        self.catch_up()
        if reason not in self.reasons:
            self._append(reason)
            self._report(reason)
        if len(self.reasons) > self.limit:
            count = f"{len(self.reasons)} of {self.images:,} images can't be decoded, expected at most {self.limit}"
            raise DataError(f"{count} (data.corrupt); the first: {self.reasons[0]}")

    def catch_up(self) -> None:
        """Report the images that other processes have added to the file."""
        for reason in self._lines():
            if reason not in self.reasons:
                self._report(reason)

    def _report(self, reason: str) -> None:
        self.reasons.append(reason)
        logger.warning("%s; the next readable image takes its place", reason)

    def _lines(self) -> list[str]:
        if self.path is None or not self.path.is_file():
            return []
        return self.path.read_text("utf-8", "replace").splitlines()

    def _append(self, reason: str) -> None:
        """Append a line in one write, so that the lines of several processes stay whole. Errors are only reported."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write(f"{reason}\n".encode("utf-8", "replace"))
        except OSError as error:
            if not self._write_failed:
                logger.warning("can't write %s: %s; they are only logged", self.path, files.reason(error))
            self._write_failed = True


class Readable(NamedTuple):
    """The images of a split that can be decoded, and their positions in it."""

    split: Split
    positions: Tensor


def readable(
    split: Split,
    progress: Progress | None = None,
    workers: int | None = None,
    bar: AbstractContextManager[None] | None = None,
) -> Readable:
    """Leave out images that can't be decoded, with a warning.

    Images in memory need no check. Streamed images are decoded once, by `workers` processes, while `bar` is shown.
    """
    images = split.images
    if not isinstance(images, Streamed):
        return Readable(split, torch.arange(len(split)))
    key = hashlib.blake2b(images.digest().encode(), digest_size=16).hexdigest()
    if key not in known:
        with bar or nullcontext():
            undecodable = _undecodable(images, key, progress or (lambda done, total, text: None), workers)
        first = next(iter(undecodable.values()), "")
        if len(undecodable) == len(images):
            raise DataError(f"none of {len(images):,} images can be decoded, the first: {first}")
        if undecodable:
            counts = f"{len(undecodable)} of {len(split):,} images"
            logger.warning("%s can't be decoded and are left out; the first: %s", counts, first)
        decodable = torch.ones(len(split), dtype=torch.bool)
        decodable[list(undecodable)] = False
        known[key] = decodable.nonzero().flatten()
    positions = known[key]
    return Readable(split if len(positions) == len(split) else split.select(positions), positions)


def _undecodable(images: Streamed, key: str, progress: Progress, workers: int | None) -> dict[int, str]:
    """The positions of images that can't be decoded, and the reasons; cached in a file."""
    path = files.user_cache() / "readable" / f"{key}.json"
    with ExitStack() as stack:
        try:
            # One of several processes checks the images, and the others wait for its result.
            stack.enter_context(files.lock(path.with_suffix(".lock")))
        except CheckpointError:
            logger.debug("the check of the images is not cached: %s can't be written", path)
        cached = _cached(path, len(images))
        if cached is not None:
            # Only these are checked again, because they may have been repaired.
            return dict(_failures(images, torch.tensor(cached, dtype=torch.int64), lambda *_: None, 0))
        if workers is None:
            workers = 0 if len(images) < _WORTH_WORKERS else default_workers()
        failures = dict(_failures(images, torch.arange(len(images)), progress, workers))
        try:
            files.write_json(path, {"images": len(images), "undecodable": list(failures)})
        except CheckpointError as error:
            logger.debug("the check of the images is not cached: %s", error)
    return failures


def _cached(path: Path, count: int) -> list[int] | None:
    """The positions of undecodable images in a cache file, if it is valid for `count` images."""
    try:
        content = files.read_json(path)
        positions = [int(position) for position in content["undecodable"]]
    except (ValueError, KeyError, TypeError):
        return None
    return positions if content["images"] == count and all(0 <= row < count for row in positions) else None


def _failures(images: Streamed, positions: Tensor, progress: Progress, workers: int) -> Iterator[tuple[int, str]]:
    """Decode the images at `positions`: the positions of those that fail, and the reasons."""
    chunks = [positions[start : start + _CHUNK] for start in range(0, len(positions), _CHUNK)]
    results = Loader(Decoder(Centre(1)), workers)(Job(images.places(chunk)) for chunk in chunks)
    done = 0
    for chunk, result in zip(chunks, results, strict=True):
        for row, reason in result.failures.items():
            yield int(chunk[row]), reason
        done += len(chunk)
        progress(done, len(positions), "checking that all can be decoded")
