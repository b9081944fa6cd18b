"""Signals that come before there is anything to save: while modules are loaded, data is read and results are drawn."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from harp.cli import voice
from harp.errors import UNFINISHED

_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


@contextmanager
def heeded() -> Iterator[None]:
    """End with the code that means: run it again. Work that has a state to save listens for itself meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    there = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in there}
    ours = [number for number in there if before[number] == signal.SIG_DFL]  # what nohup ignores stays ignored
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    voice.say_first(f"\nstopped by {name}; nothing is lost. Go on with the same command: {voice.command()}")
    sys.exit(UNFINISHED)
