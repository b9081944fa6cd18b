"""Calls that take long show their progress on a terminal and in a notebook, and nowhere else."""

import io
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import harp
from harp.system import library_progress
from harp.system.progress import Quiet, Terminal
from support import cases

Screen = Callable[[], str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal on which every call counts as long; returns what it shows."""
    screen = io.StringIO()
    monkeypatch.setattr(library_progress, "SECONDS", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console(file=screen, force_terminal=True, width=160)
    monkeypatch.setattr(library_progress, "Terminal", lambda: Terminal(console))
    return screen.getvalue


class Cell:
    """The output of a notebook's cell."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.handles = 0

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> "Cell":
        self.handles += 1
        self.update(bundle, raw=raw)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """A notebook's cell in which every call counts as long."""
    output = Cell()
    ipython: Any = types.ModuleType("IPython")
    shown: Any = types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    shown.display = output.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(library_progress, "SECONDS", -1.0)
    monkeypatch.setattr(library_progress, "_INTERVAL", -1.0)
    return output


def fit(**options: Any) -> None:
    net = cases.build("conv")
    harp.fit(net, [cases.batch(8, seed) for seed in range(3)], harp.Natural(), harp.Lamp(net, 0.1), epochs=2, **options)


def accuracy() -> None:
    harp.accuracy(cases.build("conv"), *cases.batch(), attack="pgd-2", batch=4)


def test_a_training_shows_its_epochs_and_its_loss(terminal: Screen) -> None:
    fit(validate=lambda: {"robust": 0.25})
    for text in ("Lamp", "6/6", "epoch 2/2", "loss ", "robust 25.0%"):
        assert text in terminal()


def test_an_attack_shows_its_images(terminal: Screen) -> None:
    accuracy()
    assert "accuracy" in terminal() and "16/16" in terminal()


def test_a_measurement_within_a_training_shows_nothing_of_its_own(terminal: Screen) -> None:
    fit(validate=lambda: accuracy() or {"robust": 0.5})  # type: ignore[func-returns-value]
    assert "epoch 2/2" in terminal() and "accuracy" not in terminal()
    accuracy()
    assert "accuracy" in terminal(), "after the training it does"


def test_what_is_short_shows_nothing(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_progress, "SECONDS", 1e6)
    fit()
    accuracy()
    assert terminal() == ""


def test_who_follows_the_steps_sees_nothing_else(terminal: Screen) -> None:
    steps = []
    fit(on_step=steps.append)
    harp.accuracy(cases.build("conv"), *cases.batch(), progress=lambda done, total: steps.append(done))
    assert terminal() == "" and len(steps) == 7


def test_a_training_that_fails_leaves_the_terminal_to_the_next(terminal: Screen) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(on_epoch=lambda record: 1 / 0)
    accuracy()
    assert "accuracy" in terminal()


def test_a_file_gets_nothing() -> None:
    assert type(library_progress.of_this_call()) is Quiet


def test_a_notebook_gets_one_line_that_changes(cell: Cell) -> None:
    fit(validate=lambda: {"robust": 0.25})
    assert cell.handles == 1 and len(cell.shown) == 8, "every step and every epoch"
    assert cell.shown[0]["text/plain"].startswith("Lamp: epoch 1/2, loss ") and "left" in cell.shown[0]["text/plain"]
    last = cell.shown[-1]
    assert last["text/plain"].startswith("Lamp: epoch 2/2, loss ") and last["text/plain"].endswith("robust 25.0%")
    assert '<progress value="6" max="6">' in last["text/html"]
    accuracy()
    assert cell.handles == 2 and cell.shown[-1]["text/plain"] == "accuracy: 16/16"


def test_a_shell_that_is_no_notebook_is_a_terminal(cell: Cell) -> None:
    sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace()  # type: ignore[attr-defined]
    fit()
    assert not cell.shown
