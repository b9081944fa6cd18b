"""Decoding ahead of the training, in processes of its own.

Workers know nothing: each job that they get says which bytes to decode and what was drawn for them, and they give the
jobs' images back in order. So the number of workers changes nothing but the speed, and a worker that dies is no loss:
the rest is decoded in the training process.

At most workers x `PREFETCH` batches of bytes are decoded ahead, in shared memory: 8 workers with batches of 256 images
of 224x224 pixels hold 8 x 2 x 38.5 MB = 617 MB.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from harp.data.formats import Array, Bytes, Centre, Place, careful, read_place, upright
from harp.data.streaming.augment import Augment, ResizedCrop
from harp.data.streaming.images import decode
from harp.errors import DataError, RecipeError
from harp.system.distributed import affinity
from harp.system.interrupt import SIGNALS

logger = logging.getLogger("harp")

PREFETCH = 2
"""Batches that each worker decodes ahead."""

_PRELOADED = (
    "harp.data.streaming.workers",
    "PIL.ImageOps",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.WebPImagePlugin",
)
_MMAP_THRESHOLD = -3  # glibc's number for it
_MOST = 8  # workers by default: more are rarely kept busy by one training


class Job(NamedTuple):
    """Images to decode, and what was drawn for each."""

    places: list[Place]
    draws: Array | None = None


class Decoded(NamedTuple):
    """The images of a job as bytes [N, 3, size, size], and which of them could not be decoded, and why."""

    images: Tensor
    failures: dict[int, str]


class Task(Protocol):
    """What is done with a job, here or in a worker."""

    def __getitem__(self, job: Job) -> Decoded:
        """Do it."""
        ...


@dataclass(frozen=True)
class Decoding:
    """Decode images, and augment them by what was drawn."""

    look: Centre
    augment: Augment | ResizedCrop | None = None

    def __getitem__(self, job: Job) -> Decoded:
        draws, crop = job.draws, self.augment

        def look(image: Any, row: int) -> Bytes:
            if isinstance(crop, ResizedCrop) and draws is not None:
                return crop(image, self.look.size, draws[row])
            return self.look(image)

        images, failures = decode(job.places, self.look.size, look)
        if isinstance(crop, Augment) and draws is not None:
            images = crop.apply(images, torch.from_numpy(draws))
        return Decoded(images, failures)


class Checking:
    """Decode images only to see whether that can be done."""

    def __getitem__(self, job: Job) -> Decoded:
        failures = {}
        with careful():
            for row, place in enumerate(job.places):
                try:
                    upright(read_place(place), place.name)
                except DataError as error:
                    failures[row] = str(error)
        return Decoded(torch.empty(0, dtype=torch.uint8), failures)


class Loading:
    """A task on many jobs, by so many worker processes; with none it is done where it is asked for.

    The workers stay for the next call. They end with this object.
    """

    def __init__(self, task: Task, workers: int) -> None:
        self.task, self.workers = task, check_workers(workers)
        self._jobs = _Jobs()
        self._loader: DataLoader[Decoded] | None = None

    def __call__(self, jobs: Iterable[Job]) -> Iterator[Decoded]:
        """What comes of the jobs, in their order; they are taken from the iterable no earlier than needed."""
        rest, waiting = iter(jobs), deque[Job]()
        if self.workers:
            self._jobs.now = _noted(rest, waiting)
            if self._loader is None:
                self._loader = _loader(self.task, self.workers, self._jobs)
            try:
                for done in self._loader:
                    waiting.popleft()
                    yield done
                return
            except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
                if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                    raise
                logger.warning("a loading process died (%s); images are decoded in this one for now", _line(error))
                self._loader = None
        for job in chain(list(waiting), rest):
            yield self.task[job]


class _Jobs:
    """The jobs of the present call: the loader takes them as its sampler's indices."""

    now: Iterator[Job] = iter(())

    def __iter__(self) -> Iterator[Job]:
        return self.now


def _noted(jobs: Iterator[Job], waiting: deque[Job]) -> Iterator[Job]:
    for job in jobs:
        waiting.append(job)
        yield job


def _loader(task: Task, workers: int, jobs: _Jobs) -> DataLoader[Decoded]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more workers than cores: that was asked for
        return DataLoader(
            task,  # type: ignore[arg-type]  # all that a loader needs of a data set is its items
            batch_size=None,
            sampler=jobs,  # any object can be an index
            num_workers=workers,
            collate_fn=_as_it_is,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            worker_init_fn=_settle,
            multiprocessing_context=_context(),
            generator=torch.Generator(),  # or it would draw from the training's random numbers
        )


def _context() -> Any:
    """How workers are started: not by forking this process, whose threads may hold locks at that moment.

    A server is started once, with torch and Pillow imported, and workers are forked from that, in milliseconds.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _settle(_: int) -> None:
    """Prepare a worker for a long life.

    Signals are left to the training process: Ctrl-C reaches the whole group, and the batches are still wanted then. Not
    SIGTERM, by which workers are ended. And batches are given back to the system one by one: the C library would keep
    what was allocated here and freed by the thread that sends it, a batch more each time.
    """
    threading.Thread(target=_end_with_the_training, daemon=True).start()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18)
    for number in set(SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)


def _end_with_the_training() -> None:
    """A worker's parent is the server that forked it, so nobody else would tell it that the training was killed."""
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(1)


def _as_it_is(found: Any) -> Any:
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def check_workers(workers: int) -> int:
    """The number, if it can be one of processes."""
    if workers < 0:
        raise RecipeError(f"workers {workers}, expected 0 or more")
    return workers


def default_workers(processes: int = 1) -> int:
    """So many workers as cores are left for each of the training processes on this machine, at most eight."""
    return max(0, min(_MOST, len(affinity.usable()) // max(1, processes) - 1))
