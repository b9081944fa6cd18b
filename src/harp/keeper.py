"""Keeping a training's state on disk, so that nothing is lost: not by a signal, a time limit, a kill or a full disk."""

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from harp.errors import TIME_IS_UP, CheckpointError, DiskError, Interrupted, RecipeError
from harp.states import States

logger = logging.getLogger("harp")

_SAME = 0.5  # seconds within which a second Ctrl-C is the first one, which came two ways
_MARGIN = 30.0  # seconds that a time limit leaves for what nobody has measured; a tenth of a short one
_RETRY = 60.0  # seconds until a state that could not be written is tried again
_LAST = 10.0  # seconds that the state before the end is tried for
_AGREE, _STEPS = 1.0, 100  # seconds and steps at most between two times that the ranks ask each other
_SAVE = 15.0  # seconds of work that are worth a state of their own before a long validation


class Stop:
    """Whether the work is to stop: somebody asked for it by a signal, or its time is nearly over.

    Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 (schedulers announce the end of a job by them) and SIGHUP (the terminal is gone)
    are heard; a second Ctrl-C ends the work at once.

    Arguments:
        minutes: the time that there is; none: as long as it takes.
        began: when it began, by `time.monotonic`; default now.
    """

    def __init__(self, minutes: float | None = None, began: float | None = None) -> None:
        if minutes is not None and not minutes > 0:
            raise RecipeError(f"{minutes:g} minutes: give more than 0")
        began = time.monotonic() if began is None else began
        self.deadline = math.inf if minutes is None else began + minutes * 60 - min(_MARGIN, minutes * 6)
        self.reserve = 0.0  # seconds that ending in good order takes: who works knows it
        self._signal: int | None = None
        self._heard = -math.inf
        self._process = os.getpid()

    @property
    def signal(self) -> int | None:
        """The signal that asked the work to stop; once the time is nearly over, `TIME_IS_UP`."""
        if self._signal is None and time.monotonic() > self.deadline - self.reserve:
            self._signal = TIME_IS_UP
        return self._signal

    @signal.setter
    def signal(self, number: int | None) -> None:
        self._signal = number

    def left(self) -> float:
        """The seconds that are left."""
        return self.deadline - time.monotonic()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen for a while."""
        before = {number: signal.signal(number, self._ask) for number in heard()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # forked to load data: it is for the parent to decide
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGINT and self._signal is not None and now - self._heard > _SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if number == getattr(signal, "SIGHUP", None):
            _leave_terminal()
        self._signal, self._heard = number if self._signal is None else self._signal, now


def heard() -> list[signal.Signals]:
    """The signals that ask work to stop, of those that there are here; a hang-up that nohup ignores stays ignored."""
    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
    there = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in there if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN]


def _leave_terminal() -> None:
    """Let what is printed go nowhere if the terminal is gone: an error there must not cost the state."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()
            try:
                os.write(descriptor, b"")
            except OSError:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)


def insist(write: Callable[[], None], patience: float = 600.0, stop: Stop | None = None) -> None:
    """Write what would be lost otherwise: while the disk is full, wait so many seconds, or until `stop`."""
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


class Keeper:
    """Save the state of a training: at the end of every epoch, every few minutes, and when it is to stop.

    There is always a whole state to go on from (see `harp.states`). Only rank 0 writes; all ranks read. While the disk
    takes nothing the training goes on, says so, and tries again.

    Arguments:
        path: of the newest state.
        minutes: the longest time between two states.
        keep: how many states to keep.
        of: what is trained, to refuse the states of another training.
    """

    def __init__(
        self,
        path: Path,
        stop: Stop,
        *,
        minutes: float = 10.0,
        keep: int = 2,
        of: str = "",
        fabric: Any = None,
    ) -> None:
        self.states, self.stop, self.seconds, self.fabric = States(path, keep, of), stop, minutes * 60, fabric
        self.good = "none"  # the state that is on disk, for people
        self._saved = self._looked = time.monotonic()
        self._step = self._cost = 0.0  # seconds that a step and a save take, or took not long ago
        self._rest: float | None = None  # seconds from the last step of an epoch to its end, as the last one took them
        self._wait = 0  # steps until the ranks ask each other again

    def load(self) -> dict[str, Any] | None:
        """The state to go on from, if there is one: on all ranks the one that rank 0 finds."""
        found = self._found()
        if found is None:
            return None
        path, state = found
        self.good = f"{path} ({_place(state)})"
        self._saved = self._looked = time.monotonic()
        return state

    def _found(self) -> tuple[Path, dict[str, Any]] | None:
        if not self._several():
            return self.states.load()
        found, error = None, ""
        if self.fabric.is_global_zero:
            try:
                found = self.states.load()
            except CheckpointError as problem:
                error = str(problem)
        path, error = self.fabric.broadcast((None if found is None else str(found[0]), error))
        if error:
            raise CheckpointError(error)
        if path is None:
            return None
        try:
            found = found or self.states.read(Path(path))
        except CheckpointError as problem:
            error = str(problem)
        if any(self._most(bool(error))):
            raise CheckpointError(error or f"another process of this run can't read {path}")
        return found

    def due(self, last: bool = False) -> bool:
        """Whether it is time to save before the end of an epoch; all ranks agree.

        They ask each other about once a second, after a number of steps that is the same for all. After the last step
        of an epoch validation comes: what would be lost with it is saved first.
        """
        now = time.monotonic()
        self._step = max(now - self._looked, 0.9 * self._step)
        self._looked = now
        self._reserve(1.2 * (self._rest or 0.0) if last else 0.0)
        late = now - self._saved > self.seconds
        if last and (self._rest is None or self._rest > _SAVE):
            late = late or now - self._saved > max(_SAVE, 20 * self._cost)
        if not self._several():
            return self.stop.signal is not None or late
        self._wait -= 1
        if self._wait > 0 and not last:
            return False
        asked, some_late, step = self._most(self.stop.signal or 0, late, self._step)
        self._wait = min(_STEPS, int(min(_AGREE, self.seconds) / max(step, 1e-4)))
        if asked:
            self.stop.signal = int(asked)
        return bool(asked or some_late)

    def save(self, state: dict[str, Any]) -> None:
        """Write the state, then end the work if it is to stop."""
        began, failure = time.monotonic(), ""
        self._reserve()
        if state["step"] == 0:
            self._rest = began - self._looked
        if not self._several() or self.fabric.is_global_zero:
            failure = self._write(state)
        self._saved = self._looked = time.monotonic()
        self._cost = max(self._saved - began, 0.9 * self._cost)
        number = self.stop.signal or 0
        if self._several():
            asked, failed, self._cost = self._most(number, bool(failure), self._cost)
            number = int(asked)
            failure = failure or ("process 0 could not write it" if failed else "")
        if failure:
            self._saved += min(self.seconds, _RETRY) - self.seconds
        else:
            self.good = f"{self.states.path} ({_place(state)})"
        if number:
            self._end(number, state, failure)

    def _end(self, number: int, state: dict[str, Any], failure: str) -> None:
        self.stop.signal = number
        where = f"stopped in {_place(state)}"
        if failure:
            raise DiskError(f"{where}, but the state is NOT saved: {failure}; the last one on disk: {self.good}")
        raise Interrupted(f"{where}; the state is saved", number)

    def _write(self, state: dict[str, Any]) -> str:
        """Write the state; what went wrong, if the disk didn't take it."""
        try:
            insist(lambda: self.states.save(state), 0.0 if self.stop.signal is None else _LAST)
        except DiskError as error:
            if self.stop.signal is None:
                again = f"in {min(self.seconds, _RETRY):.0f} s at the soonest"
                logger.warning("%s; training goes on, trying again %s. Last state: %s", error, again, self.good)
            return str(error)
        return ""

    def _reserve(self, more: float = 0.0) -> None:
        """Keep as much time as the next step, or `more`, and a save take."""
        self.stop.reserve = 2 * (self._step + self._cost) + more + (_AGREE if self._several() else 0.0)

    def _most(self, *values: float) -> Sequence[float]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.fabric.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def _several(self) -> bool:
        return self.fabric is not None and self.fabric.world_size > 1


def _place(state: dict[str, Any]) -> str:
    return f"epoch {state['epoch'] + 1}, step {state['step']}"
