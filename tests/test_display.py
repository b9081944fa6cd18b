"""What a person sees."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from harp import picture, summary
from harp.display import Terminal, bar

LAYERS = [{"name": "conv.weight", "size": 1000, "kept": 10}, {"name": "fc.weight", "size": 50, "kept": 50}]
HISTORY = {
    "prune": [{"epoch": 1, "natural": 0.5, "robust": 0.4}, {"epoch": 2, "natural": 0.6, "robust": 0.5}],
    "none": [],
}


def test_bars_grow_with_the_share() -> None:
    assert [bar(share, 2) for share in (0, 1 / 16, 0.5, 1, 7)] == ["", "▏", "█", "██", "██"]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_epoch_loss_gamma_rate_and_accuracies(terminal: bool) -> None:
    screen = io.StringIO()
    display = Terminal(Console(file=screen, force_terminal=terminal, width=160))
    with display.training("prune", epochs=2, steps=3):
        for epoch in (0, 1):
            for step in (1, 2, 3):
                display.step({"epoch": epoch, "step": step, "loss": 1.25, "gamma": 0.02, "rate": 0.1})
            display.epoch({"epoch": epoch + 1, "natural": 0.5, "robust": 0.25})
    shown = screen.getvalue()
    for text in ("prune", "epoch 2/2", "loss 1.250", "γ 0.02", "rate 10.00%", "natural 50.0%", "robust 25.0%"):
        assert text in shown
    if terminal:
        assert "6/6" in shown


def test_tables_and_headline(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().table("layers", summary.LAYER_COLUMNS, summary.layer_rows(LAYERS))
    out = capsys.readouterr().out
    assert "conv.weight" in out and "1.000%" in out and "total" in out and "60" in out
    dense = [{"name": "natural", "value": 0.9}]
    results = [{"name": "natural", "value": 0.8, "low": 0.7, "high": 0.9, "n": 100}]
    assert summary.headline(dense, results, LAYERS) == "weights 1,050 → 60 (5.714%), natural 90.0% → 80.0%"
    assert summary.result_rows(dense, results) == [["natural", "90.0%", "80.0%", "70.0% – 90.0%", "100", "–"]]
    assert summary.epsilon_text({"attack": {"epsilon": 8 / 255}}) == "8/255"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"layers.{suffix}"
    picture.draw(path, "title", LAYERS, HISTORY)
    head = path.read_bytes()[:200]
    assert b"PNG" in head if suffix == "png" else b"<?xml" in head
    picture.draw(path, "nothing learned yet", LAYERS, {})


def test_a_log_without_a_terminal_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    display = Terminal(Console(file=screen, force_terminal=False, width=160))
    clock = iter([0.0, *(31.0 * tick for tick in range(1, 20))])
    monkeypatch.setattr("harp.display.time.monotonic", lambda: next(clock))
    with display.training("prune", epochs=1, steps=9):
        for step in range(1, 5):
            display.step({"epoch": 0, "step": step, "loss": 1.0})
    assert screen.getvalue().count("step") == 2
