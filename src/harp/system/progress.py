"""Progress displays: a live bar on a terminal, plain lines in a log file, nothing when used as a library."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from harp.system.table import print_table

_FORMATS = {
    "loss": "loss {:.3f}",
    "gamma": "γ {:.3g}",
    "rate": "rate {:.2%}",
    "natural": "natural {:.1%}",
    "robust": "robust {:.1%}",
}

_INTERVAL = 60.0  # seconds after which a log without a terminal gets a line in the middle of an epoch


_WIDE = 80  # columns from which a bar has its full length
_LONGEST_TIME = 7  # characters: 1:23:45
_SHORTEST_NAME = 4
_UNLIMITED = 100_000


class _Numbers(ProgressColumn):
    """What the work has come to: as many of the texts between commas as there is room for."""

    def render(self, task: Task) -> "_Fitting":
        """The texts of the task."""
        return _Fitting(task.fields["numbers"])


class _Fitting:
    """Texts with commas in between, the last of which are left out where there is no room."""

    def __init__(self, texts: str) -> None:
        self.texts = texts

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, len(self.texts))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitting = self.texts
        while len(fitting) > options.max_width:
            fitting = fitting.rpartition(", ")[0]
        yield Text(fitting, no_wrap=True)


class Quiet:
    """Show nothing: the base of every display."""

    def note(self, text: str) -> None:
        """Print one line."""

    @contextmanager
    def training(self, name: str, epochs: int, steps: int, first: int = 0) -> Iterator[None]:
        """Show the progress of a training of `steps` steps an epoch, starting at the epoch `first`."""
        yield

    def step(self, record: Mapping[str, Any]) -> None:
        """Update the training after a step."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Update the training after an epoch."""

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[None]:
        """Show the progress of work on `total` examples."""
        yield

    def count(self, done: float, total: int, text: str = "") -> None:
        """Update the number of examples that are done; `text` describes the current work."""

    @contextmanager
    def counting_runs(self, name: str, total: int, done: int = 0) -> Iterator[None]:
        """Show the progress of `total` runs, `done` of which were finished before."""
        yield

    def active_runs(self, running: Sequence[str]) -> None:
        """Update the list of active runs."""

    def run_finished(self, name: str, failure: str | None, running: Sequence[str]) -> None:
        """Update the display after a run finished or failed."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table; the first column is text, the others are numbers."""


class Terminal(Quiet):
    """Show a live bar on a terminal; in a file, a pipe or a batch job print a line an epoch."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._name, self._epochs, self._steps = "", 0, 0
        self._last: dict[str, Any] = {}
        self._began = self._last_line = 0.0
        self._total = self._done = self._finished = 0  # runs: all, done, done since the display began

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, name: str, epochs: int, steps: int, first: int = 0) -> Iterator[None]:
        """Show a bar over the steps of a training, `first` epochs of which are done already."""
        self._name, self._epochs, self._steps, self._last = name, epochs, steps, {}
        with self._bar(name, epochs * steps, first * steps):
            yield

    def step(self, record: Mapping[str, Any]) -> None:
        """Move the bar."""
        self._last |= record
        done = record["epoch"] * self._steps + record["step"]
        if self._progress:
            self._progress.update(self._task, completed=done, numbers=self._numbers(record["epoch"] + 1))
        elif time.monotonic() - self._last_line > _INTERVAL:
            self._line(f"{self._numbers(record['epoch'] + 1)}, step {record['step']}/{self._steps}")

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Print a line if there is no terminal."""
        self._last |= record
        if not self.console.is_interactive:
            self._line(self._numbers(record["epoch"]))

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[None]:
        """Show a bar over examples."""
        self._name = name
        with self._bar(name, total, 0):
            yield

    def count(self, done: float, total: int, text: str = "") -> None:
        """Move the bar; without a terminal print a line once a minute."""
        if self._progress:
            self._progress.update(self._task, completed=done, total=total, numbers=text)
        elif time.monotonic() - self._last_line > _INTERVAL:
            self._line(f"{done:.0f}/{total}{text and ', '}{text}")

    @contextmanager
    def counting_runs(self, name: str, total: int, done: int = 0) -> Iterator[None]:
        """Show a bar over runs."""
        self._name, self._total, self._done, self._finished = name, total, done, 0
        with self._bar(name, total, done):
            yield

    def active_runs(self, running: Sequence[str]) -> None:
        """Show the names of the active runs beside the bar."""
        if self._progress:
            names = ", ".join(running[:3]) + ("" if len(running) <= 3 else f" and {len(running) - 3} more")
            self._progress.update(self._task, completed=self._done, numbers=f"{names}{self._remaining()}")

    def run_finished(self, name: str, failure: str | None, running: Sequence[str]) -> None:
        """Move the bar; print a line if there is no terminal or if the run failed."""
        self._done, self._finished = self._done + 1, self._finished + 1
        self.active_runs(running)
        if failure is not None or not self.console.is_interactive:
            self.note(f"{self._name} {self._done}/{self._total}: {name}, {failure or 'done'}{self._remaining()}")

    def _remaining(self) -> str:
        if not self._finished or self._done == self._total:
            return ""
        seconds = (time.monotonic() - self._began) / self._finished * (self._total - self._done)
        return f", about {duration(seconds)} left"

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table to standard output, as wide as the terminal; a file or a pipe gets every row in one line."""
        console = Console(highlight=False, markup=False)
        if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
            console.width = _UNLIMITED
        print_table(console, title, columns, rows)

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.note(f"{self._name}: {text}, {self._last_line - self._began:.0f} s")

    def _numbers(self, epoch: int) -> str:
        numbers = [text.format(self._last[key]) for key, text in _FORMATS.items() if key in self._last]
        return ", ".join([f"epoch {epoch}/{self._epochs}", *numbers])

    @contextmanager
    def _bar(self, name: str, total: int, completed: int) -> Iterator[None]:
        self._began = self._last_line = time.monotonic()
        if not self.console.is_interactive:  # a file, a pipe, or a terminal that can't move its cursor
            yield
            return
        width = 20 if self.console.width >= _WIDE else 6
        room = self.console.width - width - (2 * len(str(total)) + 1) - _LONGEST_TIME - 3  # for the name
        columns = [
            TextColumn("{task.description}"),
            BarColumn(width, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            _Numbers(),
        ]
        name = name if len(name) <= room else name[: max(room, _SHORTEST_NAME)].rstrip()
        with Progress(*columns, console=self.console) as self._progress:
            self._task = self._progress.add_task(name, total=total, completed=completed, numbers="")
            try:
                yield
            finally:
                self._progress.refresh()
                self._progress = None


def duration(seconds: float) -> str:
    """A duration as readable text."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def bar(share: float, width: int = 20) -> str:
    """A bar for a share from 0 to 1, drawn in steps of an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
