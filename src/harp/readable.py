"""Which images can be decoded: found out before they are evaluated on, and remembered.

An evaluation must not put another image in the place of a damaged one, as a training does. Damaged ones are left out,
so they have to be known first. The verdict is kept in the user's cache folder, by the files' names and sizes.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from harp import files
from harp.errors import CheckpointError, DataError
from harp.sources.index import user_cache
from harp.split import Split
from harp.streaming.loading import Checking, Job, Loading, default_workers
from harp.streaming.streamed import Streamed

logger = logging.getLogger("harp")

_CHUNK = 64  # images a job
_WORTH_WORKERS = 2000  # images: starting processes takes a few seconds
_known: dict[str, Tensor] = {}

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
    """Leave out what can't be decoded; a warning tells of it.

    Images in memory all can. Of streamed ones each is decoded once, by `workers` processes, while `bar` is shown.
    """
    images = split.images
    if not isinstance(images, Streamed):
        return Readable(split, torch.arange(len(split)))
    key = hashlib.blake2b(images.digest().encode(), digest_size=16).hexdigest()
    if key not in _known:
        with bar or nullcontext():
            bad = _verdict(images, key, progress or (lambda done, total, text: None), workers)
        first = next(iter(bad.values()), "")
        if len(bad) == len(images):
            raise DataError(f"none of {len(images):,} images can be decoded, the first: {first}")
        if bad:
            counts = f"{len(bad)} of {len(split):,} images"
            logger.warning("%s can't be decoded and are left out; the first: %s", counts, first)
        good = torch.ones(len(split), dtype=torch.bool)
        good[list(bad)] = False
        _known[key] = good.nonzero().flatten()
    positions = _known[key]
    return Readable(split if len(positions) == len(split) else split.select(positions), positions)


def _verdict(images: Streamed, key: str, progress: Progress, workers: int | None) -> dict[int, str]:
    """The images that can't be decoded, by position, and why."""
    path = user_cache() / "readable" / f"{key}.json"
    with ExitStack() as stack:
        try:
            # Of several processes one looks, and the others wait for what it finds.
            stack.enter_context(files.lock(path.with_suffix(".lock")))
        except CheckpointError:
            logger.debug("no verdict is kept: %s can't be written", path)
        found = _remembered(path, len(images))
        if found is not None:
            # Only these are looked at again: somebody may have mended them.
            return dict(_failures(images, torch.tensor(found, dtype=torch.int64), lambda *_: None, 0))
        if workers is None:
            workers = 0 if len(images) < _WORTH_WORKERS else default_workers()
        bad = dict(_failures(images, torch.arange(len(images)), progress, workers))
        try:
            files.write_json(path, {"images": len(images), "undecodable": list(bad)})
        except CheckpointError as error:
            logger.debug("no verdict is kept: %s", error)
    return bad


def _remembered(path: Path, count: int) -> list[int] | None:
    try:
        told = json.loads(path.read_text("utf-8"))
        positions = [int(each) for each in told["undecodable"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return positions if told["images"] == count and all(0 <= each < count for each in positions) else None


def _failures(images: Streamed, positions: Tensor, progress: Progress, workers: int) -> Iterator[tuple[int, str]]:
    parts = [positions[start : start + _CHUNK] for start in range(0, len(positions), _CHUNK)]
    verdicts = Loading(Checking(), workers)(Job(images.places(part)) for part in parts)
    done = 0
    for part, found in zip(parts, verdicts, strict=True):
        for row, reason in found.failures.items():
            yield int(part[row]), reason
        done += len(part)
        progress(done, len(positions), "checking that all can be decoded")
