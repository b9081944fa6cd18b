"""Signals outside of training: while the command starts, modules are imported, data is read and results are drawn.

Imported before everything else: whatever this file needs at its top delays the moment from which Ctrl-C is quiet.
"""

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""


class _State:
    """What has happened to this process so far."""

    interrupted = False  # Ctrl-C was pressed: whatever fails now fails because of it
    over = False  # the command has printed all it has to say
    unraisable = sys.unraisablehook


def install() -> None:
    """End with one line on a signal. Work that has a state to save installs its own handlers meanwhile."""
    import threading

    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may install handlers
    _State.interrupted = _State.over = False
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has not all of them
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # one that nohup ignores stays ignored
            signal.signal(number, _stop)
    if sys.unraisablehook is not _unraisable:
        _State.unraisable, sys.unraisablehook = sys.unraisablehook, _unraisable


def interrupted() -> bool:
    """Whether Ctrl-C was pressed."""
    return _State.interrupted


def work_is_over() -> None:
    """From now on a signal ends the process without a word: the interpreter only tidies up."""
    _State.over = True


def end_quietly() -> "NoReturn":
    """Say in one line that Ctrl-C ended the command, and exit."""
    _say("\nstopped")
    sys.exit(INTERRUPTED)


def command_line() -> str:
    """The command line of this process."""
    import shlex

    return shlex.join(["harp", *sys.argv[1:]])


def _interrupt(number: int, frame: "FrameType | None") -> None:
    _State.interrupted = True
    if _State.over:
        os._exit(INTERRUPTED)
    if _importing(frame):
        _say("\nstopped")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _stop(number: int, frame: "FrameType | None") -> None:
    if _State.over:
        os._exit(128 + number)
    from harp.errors import UNFINISHED

    name = signal.Signals(number).name
    _say(f"\nstopped by {name}; nothing is lost. Go on with the same command: {command_line()}")
    if _importing(frame):
        os._exit(UNFINISHED)
    sys.exit(UNFINISHED)


def _importing(frame: "FrameType | None") -> bool:
    """Whether a module is being imported, which may swallow or wrap an exception: then the process has to end at once.

    Not if other processes take part: they must be told.
    """
    peers = sys.modules.get("harp.system.distributed.peers")
    if peers is not None and getattr(peers, "several", bool)():
        return False
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _say(text: str) -> None:
    """Print a line by the first of several processes. The terminal may be gone, and `sys.stderr` be busy."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        try:  # not by `suppress`: contextlib would make Ctrl-C wait for its import
            os.write(2, os.fsencode(f"{text}\n"))
        except OSError:
            return


def _unraisable(problem: "Any") -> None:
    """A signal in a destructor or a callback, out of which Python raises nothing, ends the process too."""
    if problem.exc_type is KeyboardInterrupt:
        _say("\nstopped")
        os._exit(INTERRUPTED)
    if problem.exc_type is SystemExit:
        os._exit(problem.exc_value.code)
    _State.unraisable(problem)
