"""Requests to stop, by a signal or a time limit, and writes that are repeated while the disk is full."""

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

from harp.errors import TIME_IS_UP, DiskError, RecipeError

logger = logging.getLogger("harp")

# SIGINT is Ctrl-C, schedulers send the next three before the end of a job, SIGHUP comes when the terminal closes.
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
SIGNALS: tuple[signal.Signals, ...] = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""The signals that ask a process to stop, as far as this system has them."""

_DUPLICATE = 0.5  # seconds within which a second SIGINT counts as the same Ctrl-C, received twice
_MARGIN = 30.0  # seconds of a time limit that are reserved for unmeasured work; a tenth of a short limit


class Stop:
    """Whether the work should stop, because of a signal or because its time is nearly over.

    A second Ctrl-C ends the process at once.

    Arguments:
        minutes: the time limit; None: no limit.
        began: the start of the time limit, by `time.monotonic`; default: now.
    """

    def __init__(self, minutes: float | None = None, began: float | None = None) -> None:
        if minutes is not None and not minutes > 0:
            raise RecipeError(f"{minutes:g} minutes: give more than 0")
        began = time.monotonic() if began is None else began
        self.deadline = math.inf if minutes is None else began + minutes * 60 - min(_MARGIN, minutes * 6)
        self.reserve = 0.0  # seconds needed to save and stop, set by the work itself
        self._signal: int | None = None
        self._last_signal = -math.inf
        self._process = os.getpid()

    @property
    def signal(self) -> int | None:
        """The signal that asked the work to stop, or `TIME_IS_UP` once the time is nearly over."""
        if self._signal is None and time.monotonic() > self.deadline - self.reserve:
            self._signal = TIME_IS_UP
        return self._signal

    @signal.setter
    def signal(self, number: int | None) -> None:
        self._signal = number

    def left(self) -> float:
        """The seconds that are left."""
        return self.deadline - time.monotonic()

    def on_signals(self) -> AbstractContextManager[None]:
        """Handle signals inside this context."""
        return handled(dict.fromkeys(stop_signals(), self._handle))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # a forked data loader: the parent decides when to stop
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGINT and self._signal is not None and now - self._last_signal > _DUPLICATE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if number == getattr(signal, "SIGHUP", None):
            _detach_terminal()
        self._signal, self._last_signal = number if self._signal is None else self._signal, now


@contextmanager
def handled(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals in other ways for a while."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_signals() -> list[signal.Signals]:
    """The signals that `Stop` handles: a SIGHUP that nohup ignores stays ignored."""
    return [number for number in SIGNALS if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN]


def _detach_terminal() -> None:
    """Redirect output to the null device if the terminal is gone: a failed print must not prevent saving the state."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()
            try:
                os.write(descriptor, b"")
            except OSError:
                with open(os.devnull, "wb") as null:
                    os.dup2(null.fileno(), descriptor)


def insist(write: Callable[[], None], patience: float = 600.0, stop: Stop | None = None) -> None:
    """Write, and retry while the disk is full, for `patience` seconds or until a request to stop."""
    end, pause = time.monotonic() + patience, 1.0
    while True:
        try:
            return write()
        except DiskError as error:
            left = end - time.monotonic()
            if not error.full or left < pause or (stop is not None and stop.signal is not None):
                raise
            logger.warning("%s; waiting for room, %.0f s at most", error, left)
            time.sleep(pause)
            pause = min(2 * pause, 30.0)
