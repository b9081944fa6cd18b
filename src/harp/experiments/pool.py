"""Several runs at a time, each in a process of its own, so that the failure of one leaves the others alone."""

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

from harp.errors import AT_CHANCE, TIME_IS_UP, UNFINISHED, Interrupted
from harp.system.distributed import affinity
from harp.system.interrupt import Stop
from harp.system.progress import Quiet


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
    """A run, to be started once the task that it builds on is done."""

    name: str
    after: str | None = None


Start = Callable[[str], Process]


def harp_run(
    recipe: Path,
    out: Path,
    data_dir: Path | None,
    *,
    devices: int = 1,
    workers: int | None = None,
    minutes: float | None = None,
) -> tuple[str, ...]:
    """The command `harp run` for a recipe file, with this Python and perhaps a time limit."""
    command = [sys.executable, "-m", "harp", "run", str(recipe), "--out", str(out)]
    command += [] if data_dir is None else ["--data-dir", str(data_dir)]
    command += [] if workers is None else ["--workers", str(workers)]
    command += [] if minutes is None else ["--max-minutes", f"{minutes:.3f}"]
    return tuple(command if devices == 1 else [*command, "--devices", str(devices)])


def start(command: Sequence[str], log: Path, processes: int) -> Process:
    """Start a command as one of so many processes: it gets its share of the cores, and writes to a log file."""
    share = max(1, len(affinity.usable()) // processes)
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(share, int(given)) if given.isdigit() and int(given) else share
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("HARP_WORKERS", str(share - 1))  # the processes that decode images use the same cores
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        # In a session of its own it does not get a terminal's Ctrl-C, which is passed on: two would end it unsaved.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def work(
    tasks: Sequence[Task], start: Start, jobs: int, display: Quiet, total: int | None = None, stop: Stop | None = None
) -> dict[str, str]:
    """Do the tasks in their order, `jobs` at a time; return the failures by name. `total` includes finished runs.

    A request to stop is passed on to the processes, which save their state; once they have ended, `Interrupted` is
    raised. It is also raised if a process ends by itself with the code for saved but unfinished work.
    """
    total = len(tasks) if total is None else total
    waiting, running, failed = list(tasks), dict[str, Process](), dict[str, str]()
    stop, passed_on, unfinished = stop or Stop(), False, set[str]()
    with stop.on_signals(), display.counting_runs("runs", total, total - len(tasks)), _ended_on_error(running):
        while running or (waiting and stop.signal is None):
            while len(running) < jobs and stop.signal is None:
                task = _next(waiting, running)
                if task is None:
                    break
                if task.after in unfinished:
                    unfinished.add(task.name)
                elif task.after in failed:
                    failed[task.name] = f"not started: {task.after} failed"
                    display.run_finished(task.name, failed[task.name], list(running))
                else:
                    running[task.name] = start(task.name)
                    display.active_runs(list(running))
            if stop.signal is not None and not passed_on:
                passed_on = True
                for process in running.values():
                    process.send_signal(signal.SIGTERM if stop.signal == TIME_IS_UP else stop.signal)
            ended = {name: code for name, process in running.items() if (code := process.poll()) is not None}
            for name, code in ended.items():
                del running[name]
                if code == UNFINISHED or (stop.signal is not None and code == 128 + signal.SIGINT):
                    unfinished.add(name)
                elif code not in (0, AT_CHANCE):  # a network at chance level is a result, too
                    failed[name] = f"exit code {code}"
                display.run_finished(
                    name, "saved, unfinished" if name in unfinished else failed.get(name), list(running)
                )
            if not ended and running:
                time.sleep(0.05)
    if stop.signal is not None:
        raise Interrupted("stopped; finished runs stay and the others' states are saved", stop.signal)
    if unfinished:
        count = f"{len(unfinished)} of {total} runs"
        raise Interrupted(f"{count} are unfinished; finished runs stay and the others' states are saved", TIME_IS_UP)
    return failed


@contextmanager
def _ended_on_error(running: Mapping[str, Process]) -> Iterator[None]:
    """If a process can't be started, ask the others to save and end."""
    try:
        yield
    except BaseException:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        raise


def _next(waiting: list[Task], running: Mapping[str, Process]) -> Task | None:
    """Take the first task that waits for no other one."""
    unfinished = {task.name for task in waiting} | set(running)
    task = next((task for task in waiting if task.after not in unfinished), None)
    if task is not None:
        waiting.remove(task)
    return task
