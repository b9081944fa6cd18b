"""Check which images can be decoded before they are evaluated, and cache the result.

A training replaces a damaged image by another one. An evaluation must leave it out instead, so damaged images have to
be known in advance. The result is cached in the user's cache folder, by the names and sizes of the files.
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
from harp.data.datasets.index import user_cache
from harp.data.streaming.images import Streamed
from harp.data.streaming.workers import Checking, Job, Loading, default_workers
from harp.errors import CheckpointError, DataError
from harp.system import files

logger = logging.getLogger("harp")

_CHUNK = 64  # images per job
_WORTH_WORKERS = 2000  # images from which starting worker processes, a few seconds, pays off
known: dict[str, Tensor] = {}  # the positions of the decodable images, by the digest of a split

Progress = Callable[[float, int, str], None]


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
    path = user_cache() / "readable" / f"{key}.json"
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
    results = Loading(Checking(), workers)(Job(images.places(chunk)) for chunk in chunks)
    done = 0
    for chunk, result in zip(chunks, results, strict=True):
        for row, reason in result.failures.items():
            yield int(chunk[row]), reason
        done += len(chunk)
        progress(done, len(positions), "checking that all can be decoded")
