"""Keeping a training's state on disk, so that nothing is lost: not by Ctrl-C, not by a kill, not by a crash."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from harp import checkpoint
from harp.errors import Interrupted


class Stop:
    """Whether somebody asked the work to stop; a second request ends it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to Ctrl-C and SIGTERM for a while."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number


class Keeper:
    """Save the state of a training in a file: at the end of every epoch, every few minutes, and when asked to stop.

    The file is replaced in one move, so that whatever happens there is one whole state to go on from. Only rank 0
    writes; all ranks read.
    """

    def __init__(self, path: Path, stop: Stop, *, minutes: float = 10.0, fabric: Any = None) -> None:
        self.path, self.stop, self.seconds, self.fabric = path, stop, minutes * 60, fabric
        self.saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state to go on from, if there is one."""
        return checkpoint.load_state(self.path) if self.path.exists() else None

    def due(self) -> bool:
        """Whether it is time to save in the middle of an epoch; all ranks agree with rank 0."""
        due = self.stop.signal is not None or time.monotonic() - self.saved > self.seconds
        return bool(self.fabric.broadcast(due)) if self._several() else due

    def save(self, state: dict[str, Any]) -> None:
        """Write the state, then end the work if somebody asked for that."""
        if not self._several() or self.fabric.is_global_zero:
            checkpoint.save_state(self.path, state)
        self.saved = time.monotonic()
        number = self.fabric.broadcast(self.stop.signal) if self._several() else self.stop.signal
        if number is not None:
            where = f"epoch {state['epoch'] + 1}, step {state['step']}"
            raise Interrupted(f"stopped in {where}; the state is saved", number)

    def _several(self) -> bool:
        return self.fabric is not None and self.fabric.world_size > 1
