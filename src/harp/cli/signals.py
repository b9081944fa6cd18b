"""Signals outside of training: while modules are imported, data is read and results are drawn."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from harp.cli import processes
from harp.errors import UNFINISHED
from harp.system.interrupt import SIGNALS, handled


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with UNFINISHED on a signal. Work that has a state to save installs its own handlers meanwhile."""
    # A signal that nohup ignores stays ignored, Python handles Ctrl-C, and only the main thread may install handlers.
    ours = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL and number != signal.SIGINT]
    in_main = threading.current_thread() is threading.main_thread()
    with handled(dict.fromkeys(ours if in_main else [], _exit)):
        yield


def _exit(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    again = f"Go on with the same command: {processes.command_line()}"
    processes.print_once(f"\nstopped by {name}; nothing is lost. {again}")
    sys.exit(UNFINISHED)
