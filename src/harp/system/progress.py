"""What a person sees while the work goes on: a live bar on a terminal, plain lines elsewhere, nothing in a library."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

_SHOWN = {
    "loss": "loss {:.3f}",
    "gamma": "γ {:.3g}",
    "rate": "rate {:.2%}",
    "natural": "natural {:.1%}",
    "robust": "robust {:.1%}",
}

_SILENCE = 60.0  # seconds after which a log without a terminal gets a line in the middle of an epoch


class Quiet:
    """Show nothing: the base of every display."""

    def note(self, text: str) -> None:
        """Say one line."""

    @contextmanager
    def training(self, name: str, epochs: int, steps: int, first: int = 0) -> Iterator[None]:
        """Show a training of so many steps."""
        yield

    def step(self, record: Mapping[str, Any]) -> None:
        """Show that a step is done."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show that an epoch is done."""

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[None]:
        """Show work on so many examples."""
        yield

    def count(self, done: float, total: int, text: str = "") -> None:
        """Show how many examples are done, and by what."""

    @contextmanager
    def working(self, name: str, total: int, done: int = 0) -> Iterator[None]:
        """Show work on so many runs, some of which were done before."""
        yield

    def works(self, running: Sequence[str]) -> None:
        """Show which runs are under way."""

    def worked(self, name: str, failure: str | None, running: Sequence[str]) -> None:
        """Show that a run has ended, well or not."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table; the first column is text, the others are numbers."""


class Terminal(Quiet):
    """Show a live bar on a terminal, and a line an epoch where there is none (a file, a pipe, a batch job)."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._name, self._epochs, self._steps = "", 0, 0
        self._last: dict[str, Any] = {}
        self._began = self._said = 0.0
        self._total = self._done = self._here = 0  # runs: all, done, done here

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, name: str, epochs: int, steps: int, first: int = 0) -> Iterator[None]:
        """Show the bar of a training, `first` epochs of which are done already."""
        self._name, self._epochs, self._steps, self._last = name, epochs, steps, {}
        with self._bar(name, epochs * steps, first * steps):
            yield

    def step(self, record: Mapping[str, Any]) -> None:
        """Move the bar."""
        self._last |= record
        done = record["epoch"] * self._steps + record["step"]
        if self._progress:
            self._progress.update(self._task, completed=done, numbers=self._numbers(record["epoch"] + 1))
        elif time.monotonic() - self._said > _SILENCE:
            self._line(f"{self._numbers(record['epoch'] + 1)}, step {record['step']}/{self._steps}")

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Where there is no terminal, print a line."""
        self._last |= record
        if not self.console.is_terminal:
            self._line(self._numbers(record["epoch"]))

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[None]:
        """Show a bar over examples."""
        self._name = name
        with self._bar(name, total, 0):
            yield

    def count(self, done: float, total: int, text: str = "") -> None:
        """Move the bar; where there is no terminal, say a line now and then."""
        if self._progress:
            self._progress.update(self._task, completed=done, total=total, numbers=text)
        elif time.monotonic() - self._said > _SILENCE:
            self._line(f"{done:.0f}/{total}{text and ', '}{text}")

    @contextmanager
    def working(self, name: str, total: int, done: int = 0) -> Iterator[None]:
        """Show a bar over runs."""
        self._name, self._total, self._done, self._here = name, total, done, 0
        with self._bar(name, total, done):
            yield

    def works(self, running: Sequence[str]) -> None:
        """Name what is under way beside the bar."""
        if self._progress:
            shown = ", ".join(running[:3]) + ("" if len(running) <= 3 else f" and {len(running) - 3} more")
            self._progress.update(self._task, completed=self._done, numbers=f"{shown}{self._left()}")

    def worked(self, name: str, failure: str | None, running: Sequence[str]) -> None:
        """Move the bar; where there is no terminal, or if the run failed, print a line."""
        self._done, self._here = self._done + 1, self._here + 1
        self.works(running)
        if failure is not None or not self.console.is_terminal:
            self.note(f"{self._name} {self._done}/{self._total}: {name}, {failure or 'done'}{self._left()}")

    def _left(self) -> str:
        if not self._here or self._done == self._total:
            return ""
        seconds = (time.monotonic() - self._began) / self._here * (self._total - self._done)
        return f", about {duration(seconds)} left"

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table to standard output: it is the result. Names and numbers stay whole, other text may wrap."""
        table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            text = column == ""
            widest = max([len(column), *(len(row[index]) for row in rows)]) if not text else None
            justify: Literal["left", "right"] = "left" if text or index == 0 else "right"
            table.add_column(column, justify=justify, no_wrap=not text, min_width=widest)
        for row in rows:
            table.add_row(*row)
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console.width = 200  # a file or a pipe has no edge
        console.print(table)

    def _line(self, text: str) -> None:
        self._said = time.monotonic()
        self.note(f"{self._name}: {text}, {self._said - self._began:.0f} s")

    def _numbers(self, epoch: int) -> str:
        known = [text.format(self._last[key]) for key, text in _SHOWN.items() if key in self._last]
        return ", ".join([f"epoch {epoch}/{self._epochs}", *known])

    @contextmanager
    def _bar(self, name: str, total: int, completed: int) -> Iterator[None]:
        self._began = self._said = time.monotonic()
        if not self.console.is_terminal:
            yield
            return
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
        ]
        with Progress(*columns, console=self.console) as self._progress:
            self._task = self._progress.add_task(name, total=total, completed=completed, numbers="")
            try:
                yield
            finally:
                self._progress.refresh()
                self._progress = None


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def bar(share: float, width: int = 20) -> str:
    """A share drawn as a bar of eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
