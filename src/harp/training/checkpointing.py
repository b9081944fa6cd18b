"""Saving a training's state to disk, so that a signal, a time limit, a kill or a full disk loses little work."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harp.errors import CheckpointError, DiskError, Interrupted
from harp.system.interrupt import Stop, insist
from harp.system.states import States

logger = logging.getLogger("harp")

_RETRY = 60.0  # seconds until a failed save is tried again
_LAST = 10.0  # seconds that the last save before a stop is retried for
_AGREE, _STEPS = 1.0, 100  # the most seconds and steps between two exchanges of the ranks
_SAVE = 15.0  # the least seconds of work that are saved before a long validation


class Keeper:
    """Save the state of a training: at the end of every epoch, every few minutes, and before a stop.

    There is always a complete state on disk to resume from (see `system/states.py`). Only rank 0 writes; all ranks
    read. If a write fails, the training goes on with a warning, and the write is tried again.

    Arguments:
        path: of the newest state.
        stop: says when to stop; None: never.
        minutes: the longest time between two states.
        keep: the number of states to keep.
        of: identifies the training, to refuse the states of another one.
        fabric: of a training in several processes.

    Example:
        keeper = harp.Keeper(folder / "state.pt")  # the same call again resumes from there
        harp.fit(model, batches, harp.Natural(), harp.Dense(model), epochs=1, keeper=keeper)
    """

    def __init__(
        self,
        path: str | Path,
        stop: Stop | None = None,
        *,
        minutes: float = 10.0,
        keep: int = 2,
        of: str = "",
        fabric: Any = None,
    ) -> None:
        self.states, self.stop = States(Path(path), keep, of), Stop() if stop is None else stop
        self.seconds, self.fabric = minutes * 60, fabric
        self._several = fabric is not None and fabric.world_size > 1  # several ranks
        self.good = "none"  # the newest state on disk, for messages
        self._last_save = self._last_step = time.monotonic()
        self._step_seconds = self._save_seconds = 0.0  # the longest recent step and save
        self._validation_seconds: float | None = None  # from the last step of the previous epoch to its end
        self._wait = 0  # steps until the next exchange of the ranks

    def load(self) -> dict[str, Any] | None:
        """The state to resume from, or None; all ranks load the file that rank 0 chooses."""
        loaded = self._newest()
        if loaded is None:
            return None
        path, state = loaded
        self.good = f"{path} ({_position(state)})"
        self._last_save = self._last_step = time.monotonic()
        return state

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest readable state and its path. An error on any rank is raised on all."""
        if not self._several:
            return self.states.load()
        loaded, error = None, ""
        if self.fabric.is_global_zero:
            try:
                loaded = self.states.load()
            except CheckpointError as problem:
                error = str(problem)
        path, error = self.fabric.broadcast((None if loaded is None else str(loaded[0]), error))
        if error:
            raise CheckpointError(error)
        if path is None:
            return None
        try:
            loaded = loaded or self.states.read(Path(path))
        except CheckpointError as problem:
            error = str(problem)
        if any(self._most(bool(error))):
            raise CheckpointError(error or f"another process of this run can't read {path}")
        return loaded

    def due(self, last: bool = False) -> bool:
        """Whether to save now, before the end of the epoch; the same on all ranks.

        The ranks exchange this about once a second, after a number of steps that is the same for all. With `last`,
        validation comes next; if it is long, the state is saved first.
        """
        now = time.monotonic()
        self._step_seconds = max(now - self._last_step, 0.9 * self._step_seconds)
        self._last_step = now
        self._reserve(1.2 * (self._validation_seconds or 0.0) if last else 0.0)
        late = now - self._last_save > self.seconds
        if last and (self._validation_seconds is None or self._validation_seconds > _SAVE):
            late = late or now - self._last_save > max(_SAVE, 20 * self._save_seconds)
        if not self._several:
            return self.stop.signal is not None or late
        self._wait -= 1
        if self._wait > 0 and not last:
            return False
        asked, some_late, step = self._most(self.stop.signal or 0, late, self._step_seconds)
        self._wait = min(_STEPS, int(min(_AGREE, self.seconds) / max(step, 1e-4)))
        if asked:
            self.stop.signal = int(asked)
        return bool(asked or some_late)

    def save(self, state: dict[str, Any]) -> None:
        """Write the state, then raise `Interrupted` if a stop was requested."""
        started, failure = time.monotonic(), ""
        self._reserve()
        if state["step"] == 0:
            self._validation_seconds = started - self._last_step
        if not self._several or self.fabric.is_global_zero:
            failure = self._write(state)
        self._last_save = self._last_step = time.monotonic()
        self._save_seconds = max(self._last_save - started, 0.9 * self._save_seconds)
        signal = self.stop.signal or 0
        if self._several:
            of_any, failed, self._save_seconds = self._most(signal, bool(failure), self._save_seconds)
            signal = int(of_any)
            failure = failure or ("process 0 could not write it" if failed else "")
        if failure:
            self._last_save += min(self.seconds, _RETRY) - self.seconds
        else:
            self.good = f"{self.states.path} ({_position(state)})"
        if signal:
            self._end(signal, state, failure)

    def _end(self, signal: int, state: dict[str, Any], failure: str) -> None:
        """Raise the error that ends the training."""
        self.stop.signal = signal
        text = f"stopped in {_position(state)}"
        if failure:
            raise DiskError(f"{text}, but the state is NOT saved: {failure}; the last one on disk: {self.good}")
        raise Interrupted(f"{text}; the state is saved", signal)

    def _write(self, state: dict[str, Any]) -> str:
        """Write the state; return an error message if the disk failed, "" otherwise."""
        try:
            insist(lambda: self.states.save(state), 0.0 if self.stop.signal is None else _LAST)
        except DiskError as error:
            if self.stop.signal is None:
                again = f"in {min(self.seconds, _RETRY):.0f} s at the soonest"
                logger.warning("%s; training goes on, trying again %s. Last state: %s", error, again, self.good)
            return str(error)
        return ""

    def _reserve(self, more: float = 0.0) -> None:
        """Reserve the time of the next step and a save before a time limit, and `more` seconds."""
        self.stop.reserve = 2 * (self._step_seconds + self._save_seconds) + more + (_AGREE if self._several else 0.0)

    def _most(self, *values: float) -> Sequence[float]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.fabric.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        largest: list[float] = tensor.tolist()
        return largest


def _position(state: dict[str, Any]) -> str:
    return f"epoch {state['epoch'] + 1}, step {state['step']}"
