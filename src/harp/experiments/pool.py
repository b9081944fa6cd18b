"""Several runs at a time, each in a process of its own: what befalls one leaves the others alone."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from harp.errors import AT_CHANCE, TIME_IS_UP, UNFINISHED, Interrupted
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
    """A run to be started once the task that it builds on is done."""

    name: str
    after: str | None = None


Start = Callable[[str], Process]


def work(
    tasks: Sequence[Task],
    start: Start,
    jobs: int,
    display: Quiet,
    total: int | None = None,
    stop: Stop | None = None,
) -> dict[str, str]:
    """Do the tasks, `jobs` at a time in their order; return what went wrong, by name. `total` counts those done before.

    A request to stop is passed on to the processes, which save their state; when they have ended, `Interrupted`. That
    is also what comes of it if one ends with the code for saved but unfinished work by itself.
    """
    total = len(tasks) if total is None else total
    waiting, running, failed = list(tasks), dict[str, Process](), dict[str, str]()
    stop, passed_on, unfinished = stop or Stop(), False, set[str]()
    with stop.on_signals(), display.counting_runs("runs", total, total - len(tasks)), _left_behind(running):
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
                told = "saved, unfinished" if name in unfinished else failed.get(name)
                display.run_finished(name, told, list(running))
            if not ended and running:
                time.sleep(0.05)
    if stop.signal is not None:
        raise Interrupted("stopped; finished runs stay and the others' states are saved", stop.signal)
    if unfinished:
        count = f"{len(unfinished)} of {total} runs"
        raise Interrupted(f"{count} are unfinished; finished runs stay and the others' states are saved", TIME_IS_UP)
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
