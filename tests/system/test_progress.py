"""Progress displays, tables and plots."""

import io
import re
from pathlib import Path

import matplotlib
import pytest
from rich.console import Console

from harp.reports import plots, tables
from harp.system.progress import Terminal, bar

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
    Terminal().table("layers", tables.layer_columns(), tables.layer_rows(LAYERS))
    out = capsys.readouterr().out
    assert "conv.weight" in out and "1.000%" in out and "total" in out and "60" in out
    dense = [{"name": "natural", "value": 0.9}]
    results = [{"name": "natural", "value": 0.8, "low": 0.7, "high": 0.9, "n": 100}]
    told = {"dense": dense, "results": results, "layers": LAYERS}
    assert tables.headline(told) == "weights 1,050 → 60 (5.714%), natural 90.0% → 80.0%"
    assert tables.result_rows(dense, results) == [["natural", "90.0%", "80.0%", "70.0% – 90.0%", "100", "–"]]
    assert tables.epsilon_text({"attack": {"epsilon": 8 / 255}}) == "8/255"


def test_the_headline_is_in_the_units_of_the_budget() -> None:
    layers = [{"name": "conv2.weight", "size": 8, "kept": 3}, {"name": "fc.weight", "size": 16, "kept": 16}]
    cost = {"macs": 2000, "macs_kept": 500, "parameters": 300, "parameters_kept": 100}
    flops = {"kind": "channels", "unit": "FLOPs", "size": 4000, "kept": 1000, "total": 1001}
    told = {"dense": [], "results": [], "layers": layers, "budget": flops, "cost": cost}
    parts = ["FLOPs 4,000 → 1,000 (25.000%)", "channels 24 → 19", "MACs 2,000 → 500", "parameters 300 → 100"]
    assert tables.headline(told) == ", ".join(parts)
    told["budget"] = {**flops, "unit": "MACs", "size": 2000, "kept": 500}
    assert tables.spending(told) == ["MACs 2,000 → 500 (25.000%)", parts[1], parts[3]], "none of them twice"
    told["cost"] = None
    assert tables.spending(told) == ["MACs 2,000 → 500 (25.000%)", parts[1]]
    told |= {"budget": {**flops, "kind": "weights", "unit": "MACs"}, "layers": LAYERS, "cost": cost}
    assert tables.spending(told) == ["MACs 4,000 → 1,000 (25.000%)", "weights 1,050 → 60"]
    assert tables.layer_columns("channels")[:2] == ("read by", "channels")
    assert tables.layer_columns()[:2] == ("layer", "weights")


def test_plots_name_their_units(tmp_path: Path) -> None:
    title = " ".join(["a title of many words"] * 12)
    texts = {}
    for kind in ("weights", "channels"):
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            _, path = plots.draw(tmp_path, title, LAYERS, HISTORY, kind)
        texts[kind] = path.read_text(encoding="utf-8")
    assert "channels" in texts["channels"] and "channels" not in texts["weights"]
    lines = re.findall(r">([^<]*a title[^<]*)<", texts["channels"])
    assert len(lines) > 1 and max(map(len, lines)) <= 120, "a long title is broken"


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pixels, vectors = plots.draw(tmp_path, "title", LAYERS, HISTORY)
    assert b"PNG" in pixels.read_bytes()[:200] and b"<?xml" in vectors.read_bytes()[:200]
    plots.draw(tmp_path, "nothing learned yet", LAYERS, {})


def test_a_log_without_a_terminal_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    display = Terminal(Console(file=screen, force_terminal=False, width=160))
    clock = iter([0.0, *(31.0 * tick for tick in range(1, 20))])
    monkeypatch.setattr("harp.system.progress.time.monotonic", lambda: next(clock))
    with display.training("prune", epochs=1, steps=9):
        for step in range(1, 5):
            display.step({"epoch": 0, "step": step, "loss": 1.0})
    assert screen.getvalue().count("step") == 2
