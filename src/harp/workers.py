"""Several runs at a time, each in a process of its own: what befalls one leaves the others alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harp.display import Quiet
from harp.errors import Interrupted
from harp.keeper import Stop


class Process(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        ...

    def send_signal(self, sig: int) -> None:
        """Pass a signal on to it."""
        ...


@dataclass(frozen=True)
class Task:
    """A run to be started once the task that it builds on is done."""

    name: str
    after: str | None = None


Start = Callable[[str], Process]


def work(tasks: Sequence[Task], start: Start, jobs: int, display: Quiet, total: int | None = None) -> dict[str, str]:
    """Do the tasks, `jobs` at a time in their order; return what went wrong, by name. `total` counts those done before.

    Ctrl-C and SIGTERM are passed on to the processes, which save their state; when they have ended, `Interrupted`.
    """
    total = len(tasks) if total is None else total
    waiting, running, failed = list(tasks), dict[str, Process](), dict[str, str]()
    stop, passed_on = Stop(), False
    with stop.on_signals(), display.working("runs", total, total - len(tasks)), _left_behind(running):
        while running or (waiting and stop.signal is None):
            while len(running) < jobs and stop.signal is None:
                task = _next(waiting, running)
                if task is None:
                    break
                if task.after in failed:
                    failed[task.name] = f"not started: {task.after} failed"
                    display.worked(task.name, failed[task.name], list(running))
                else:
                    running[task.name] = start(task.name)
                    display.works(list(running))
            if stop.signal is not None and not passed_on:
                passed_on = True
                for process in running.values():
                    process.send_signal(stop.signal)
            ended = {name: code for name, process in running.items() if (code := process.poll()) is not None}
            for name, code in ended.items():
                del running[name]
                if code:
                    failed[name] = f"exit code {code}"
                display.worked(name, failed.get(name), list(running))
            if not ended and running:
                time.sleep(0.05)
    if stop.signal is not None:
        raise Interrupted("stopped; finished runs stay and the others' states are saved", stop.signal)
    return failed


@contextmanager
def _left_behind(running: Mapping[str, Process]) -> Iterator[None]:
    """If starting one fails, ask the others to save and end: nobody would look after them."""
    try:
        yield
    except BaseException:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        raise


def _next(waiting: list[Task], running: Mapping[str, Process]) -> Task | None:
    """Take the first task that waits for nothing."""
    unfinished = {task.name for task in waiting} | set(running)
    for task in waiting:
        if task.after not in unfinished:
            waiting.remove(task)
            return task
    return None


def harp_run(recipe: Path, out: Path, data_dir: Path | None, log: Path, jobs: int) -> Process:
    """Start `harp run` on its share of the machine's cores, with what it says in a log."""
    words = [sys.executable, "-m", "harp", "run", str(recipe), "--out", str(out)]
    words += [] if data_dir is None else ["--data-dir", str(data_dir)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // jobs)
    wished = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(share, int(wished)) if wished.isdigit() and int(wished) else share
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        # A session of its own: a terminal's Ctrl-C goes to us alone and is passed on once. Twice would end it unsaved.
        return subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
