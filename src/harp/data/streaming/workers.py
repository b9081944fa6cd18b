"""Decode images ahead of the training, in worker processes.

Workers have no state: each job says which bytes to decode and which random numbers to use, and the results come back in
the order of the jobs. So the number of workers affects only the speed. If a worker dies, the remaining images are
decoded in the training process.

At most workers x `PREFETCH` batches are decoded ahead, in shared memory: 8 workers with batches of 256 images of
224x224 pixels hold 8 x 2 x 38.5 MB = 617 MB.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import tee
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from harp.data.formats.bounded import Array, Bytes
from harp.data.formats.byte_ranges import Place
from harp.data.formats.images import Centre
from harp.data.streaming.augment import Augment, ResizedCrop
from harp.data.streaming.images import decode
from harp.errors import RecipeError
from harp.system import files
from harp.system.distributed import affinity
from harp.system.interrupt import SIGNALS

logger = logging.getLogger("harp")

PREFETCH = 2
"""The number of batches that each worker decodes ahead."""

_PRELOADED = ["harp.data.streaming.workers", "PIL.ImageOps"]
_PRELOADED += [f"PIL.{kind}ImagePlugin" for kind in ("Jpeg", "Png", "WebP")]
_MMAP_THRESHOLD = -3  # the number of this option in glibc
_MOST_WORKERS = 8  # by default: one training rarely keeps more of them busy


class Job(NamedTuple):
    """Images to decode, and the random numbers to augment each."""

    places: list[Place]
    draws: Array | None = None


class Decoded(NamedTuple):
    """The images of a job as bytes [N, 3, size, size], the rows that can't be decoded, and the reasons."""

    images: Tensor
    failures: dict[int, str]


@dataclass(frozen=True)
class Decoder:
    """Decodes and augments images. Like a data set of torch it is indexed, by a job."""

    crop: Centre
    augment: Augment | ResizedCrop | None = None

    def __getitem__(self, job: Job) -> Decoded:
        draws, augment = job.draws, self.augment

        def crop(image: Any, row: int) -> Bytes:
            if isinstance(augment, ResizedCrop) and draws is not None:
                return augment(image, self.crop.size, draws[row])
            return self.crop(image)

        images, failures = decode(job.places, self.crop.size, crop)
        if isinstance(augment, Augment) and draws is not None:
            images = augment.apply(images, torch.from_numpy(draws))
        return Decoded(images, failures)


class Loader:
    """Does many jobs in worker processes; without workers, in this process.

    The workers stay for the next call, and end with this object.
    """

    def __init__(self, decoder: Decoder, workers: int) -> None:
        if workers < 0:
            raise RecipeError(f"workers {workers}, expected 0 or more")
        self.decoder, self.workers = decoder, workers
        self._jobs = _Jobs()
        self._loader: DataLoader[Decoded] | None = None

    def __call__(self, jobs: Iterable[Job]) -> Iterator[Decoded]:
        """The results of the jobs, in their order; jobs are taken from the iterable only when they are needed."""
        if self.workers:
            jobs, self._jobs.ahead = tee(jobs)
            try:
                if self._loader is None:
                    self._loader = _data_loader(self.decoder, self.workers, self._jobs)
                for result in self._loader:
                    next(jobs)
                    yield result
                return
            except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
                if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                    raise
                reason = files.reason(error)
                logger.warning("a loading process died (%s); images are decoded in this one for now", reason)
                self._loader, self._jobs.ahead = None, iter(())
        for job in jobs:
            yield self.decoder[job]


class _Jobs:
    """The sampler of the DataLoader: the jobs of the current call. It must not refer to the `Loader`, see there."""

    ahead: Iterator[Job] = iter(())

    def __iter__(self) -> Iterator[Job]:
        return self.ahead


def _data_loader(decoder: Decoder, workers: int, jobs: _Jobs) -> DataLoader[Decoded]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about more workers than cores, which the user has asked for
        return DataLoader(
            decoder,  # type: ignore[arg-type]  # a DataLoader only needs its items
            batch_size=None,
            sampler=jobs,  # any object can be an index
            num_workers=workers,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            worker_init_fn=_prepare_worker,
            multiprocessing_context=_context(),
            generator=torch.Generator(),  # otherwise it draws from torch's default generator
        )


def _context() -> Any:
    """How workers are started: not by forking this process, whose threads may hold locks at that moment.

    A server process is started once, with torch and Pillow imported, and workers are forked from it in milliseconds.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _prepare_worker(_: int) -> None:
    """Called once in each worker.

    Signals are ignored, because the training process handles them: Ctrl-C reaches the whole group, and the training
    still needs the batches then. Not SIGTERM, which ends workers. The C library returns memory to the system at once:
    otherwise it keeps a batch more each time, because another thread frees what this one has allocated.
    """
    threading.Thread(target=_exit_with_training, daemon=True).start()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18)
    for number in set(SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)


def _exit_with_training() -> None:
    """Exit when the training process ends. The parent of a worker is the server, so the system does not do this."""
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(1)


def default_workers(processes: int = 1) -> int:
    """The number of cores that each training process of this machine has beside its own, at most eight."""
    return max(0, min(_MOST_WORKERS, len(affinity.usable()) // max(1, processes) - 1))
