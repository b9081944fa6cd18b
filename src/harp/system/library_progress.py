"""The progress of a call of the library, such as `harp.fit`, on a terminal or in a notebook.

A call that is done in two seconds shows nothing, and neither does one whose output goes to a file.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from html import escape
from typing import Any

from harp.system.progress import Quiet, Terminal, duration

SECONDS = 2.0  # before which nothing is shown
_INTERVAL = 0.2  # seconds between two updates of a notebook's line


def of_this_call() -> Quiet:
    """The display for a call that may take long."""
    if _in_notebook():
        return _Patient(_Notebook())
    return _Patient(Terminal()) if sys.stderr is not None and sys.stderr.isatty() else Quiet()


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class _Patient(Quiet):
    """Another display, which is opened once the call has taken a while, unless one of a call around it is open."""

    open = False  # of the class: whether any is

    def __init__(self, display: Quiet) -> None:
        self.display = display
        self._began = 0.0
        self._exits: ExitStack | None = None  # of this display, once it is open

    @contextmanager
    def training(self, name: str, epochs: int, steps: int, first: int = 0) -> Iterator[None]:
        """Show the progress of a training once it has taken a while."""
        with self._waiting(lambda: self.display.training(name, epochs, steps, first)):
            yield

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[None]:
        """Show the progress of work on examples once it has taken a while."""
        with self._waiting(lambda: self.display.counting(name, total)):
            yield

    def step(self, record: Mapping[str, Any]) -> None:
        """Update the training after a step."""
        if self._is_open():
            self.display.step(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Update the training after an epoch."""
        if self._is_open():
            self.display.epoch(record)

    def count(self, done: float, total: int, text: str = "") -> None:
        """Update the number of examples that are done."""
        if self._is_open():
            self.display.count(done, total, text)

    @contextmanager
    def _waiting(self, shown: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        self._began, self._shown = time.monotonic(), shown
        try:
            yield
        finally:
            if self._exits is not None:
                _Patient.open = False
                self._exits.close()
                self._exits = None

    def _is_open(self) -> bool:
        if self._exits is None and not _Patient.open and time.monotonic() - self._began > SECONDS:
            self._exits, _Patient.open = ExitStack(), True
            self._exits.enter_context(self._shown())
        return self._exits is not None


class _Notebook(Quiet):
    """A bar and a line below the cell, which needs no extension of the notebook."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._name, self._epochs, self._steps, self._first = "", 0, 0, 0
        self._began = self._last = 0.0
        self._texts: dict[str, str] = {}

    @contextmanager
    def training(self, name: str, epochs: int, steps: int, first: int = 0) -> Iterator[None]:
        """Show a bar over the steps of a training, `first` epochs of which are done already."""
        self._epochs, self._steps, self._first = epochs, steps, first * steps
        with self._shown(name):
            yield

    def step(self, record: Mapping[str, Any]) -> None:
        """Move the bar."""
        self._take(record)
        self._show(record["epoch"] * self._steps + record["step"], self._epochs * self._steps, record["epoch"] + 1)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show what was measured at the end of an epoch."""
        self._take(record)
        self._show(record["epoch"] * self._steps, self._epochs * self._steps, record["epoch"], at_once=True)

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[None]:
        """Show a bar over examples."""
        self._first = 0
        with self._shown(name):
            yield

    def count(self, done: float, total: int, text: str = "") -> None:
        """Move the bar."""
        self._texts = {"text": text} if text else {}
        self._show(done, total, at_once=done >= total)

    @contextmanager
    def _shown(self, name: str) -> Iterator[None]:
        self._name, self._began = name, time.monotonic()
        self._handle, self._last, self._texts = None, 0.0, {}
        yield

    def _take(self, record: Mapping[str, Any]) -> None:
        formats = {"loss": "loss {:.3f}", "natural": "natural {:.1%}", "robust": "robust {:.1%}"}
        self._texts |= {key: text.format(record[key]) for key, text in formats.items() if key in record}

    def _show(self, done: float, total: int, epoch: int | None = None, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._last < _INTERVAL and not at_once:
            return
        self._last = now
        parts = [f"{done:.0f}/{total}"] if epoch is None else [f"epoch {epoch}/{self._epochs}"]
        parts += self._texts.values()
        if self._first < done < total:
            parts.append(f"about {duration((now - self._began) / (done - self._first) * (total - done))} left")
        line = f"{self._name}: {', '.join(parts)}"
        bar = f'<progress value="{done:.0f}" max="{total}"></progress> '
        bundle = {"text/plain": line, "text/html": bar + escape(line)}
        if self._handle is None:
            from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
