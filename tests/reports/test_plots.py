"""Charts in a page: marks with tooltips, text that stays text, and colours that are variables of the page."""

import builtins
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harp.errors import MissingExtra
from harp.reports import html, plots
from harp.reports.plots import Chart, Level, Series
from support.reports import make_run

NUMBERS = st.none() | st.floats(-1e30, 1e30) | st.sampled_from([float("nan"), float("inf")])


def marks(svg: str) -> list[ElementTree.Element]:
    """The groups of marks of a drawing, which must be well-formed."""
    return [group for group in ElementTree.fromstring(svg).iter("g") if group.get("class") == "mark"]


def tooltips(svg: str) -> list[str]:
    return [note.text or "" for group in marks(svg) for note in group.iter("title")]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6), st.booleans())
def test_any_values_can_be_drawn(pairs: list[tuple[float | None, float | None]], rows: bool) -> None:
    y, low = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    series = [Series("s <", 9, range(len(pairs)), y, low, y)]
    names = [f"row & {number}" for number in range(len(pairs))] if rows else []
    svg = plots.inline(Chart("b", "x <", "y &", series, names, levels=[Level(0.5, "<dense>")]), "a 'title' \"<")
    finite = [value for value in y if value is not None and abs(value) < float("inf")]
    assert len([text for text in tooltips(svg) if text.startswith("s <, ")]) == len(finite)
    assert not re.search(r"\bnan|\binf", re.sub(r"<title>.*?</title>", "", svg))


def test_a_tooltip_has_name_place_value_and_interval() -> None:
    series = [Series("harp", 0, [0, 1], [50.0, None], [40.0, None], [60.0, None])]
    svg = plots.inline(Chart("", "accuracy (%)", "", series, ["cat", "dog"], "bars", unit=" %", whole=True), "classes")
    assert "harp, cat: 50 % (40 – 60)" in tooltips(svg)
    svg = plots.inline(Chart("", "ε (linf)", "accuracy (%)", series, unit=" %", whole=True), "curve")
    assert tooltips(svg) == ["harp, ε 0: 50.0 % (40.0 – 60.0)"]


def test_a_line_does_not_bridge_missing_values() -> None:
    values = [1.0, 2.0, None, 1.0, 2.0, float("nan"), 3.0]
    (group,) = marks(plots.inline(Chart("", "x", "y", [Series("s", 0, range(7), values)]), "t"))
    line = next(path.get("d") or "" for path in group.iter("path"))
    assert line.count("M") == 3 and len(list(group.iter("use"))) == 5


def test_styles_do_not_repeat_within_a_comparison() -> None:
    looks = {re.sub(r'(id|href)="[^"]*"', "", plots.swatch(number, "lines")) for number in range(50)}
    assert len(looks) == 50


def test_long_names_are_shortened_and_kept_in_the_tooltip() -> None:
    name = "encoder.layers.11.self_attention.out_projection"
    svg = plots.inline(Chart("", "x", "", [Series("s", 0, [0], [5.0])], [name], log=True), "t")
    assert f"<title>{name}</title>" in svg
    lines = re.findall(r"<text[^>]*>(encoder[^<]*|[^<]*projection)</text>", svg)
    assert "".join(lines) == name and all(len(line) <= 25 for line in lines), "two lines are enough for this one"
    longer = f"{name}.with_more_and_more"
    svg = plots.inline(Chart("", "x", "", [Series("s", 0, [0], [5.0])], [longer]), "t")
    assert "…" in svg.split("<title>")[0] + svg and f"<title>{longer}</title>" in svg
    assert len(plots.shorten(name, 22)) == 22 and plots.shorten("short", 22) == "short"


@pytest.mark.parametrize("name", ["$x_{$", "a\x01b", "猫", '" xmlns="x', "<b>", "a_b^c\\d", ""])
def test_a_name_of_any_letters_is_shown_as_it_is(name: str, tmp_path: Path) -> None:
    svg = plots.inline(Chart(name, name, name, [Series(name, 0, [0], [5.0])], [name, "x"]), name)
    shown = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert shown.count(name.replace("\x01", "")) >= bool(name) * 2
    plots.draw(tmp_path, name, [{"name": name, "size": 2, "kept": 1}], {name: [{"robust": 0.5}]})


def test_methods_at_one_budget_are_drawn_side_by_side() -> None:
    series = [Series(name, number, [10.0, 1.0], [50.0, 40.0]) for number, name in enumerate(("a", "b", "c"))]
    svg = plots.inline(Chart("", "weights kept (%)", "", series, log=True, budgets=[1.0, 10.0], unit=" %"), "t")
    places = [float(use.get("x") or 0) for group in marks(svg) for use in group.iter("use")]
    assert len(set(places)) == 6 and places[0] < places[1], "the small budget is at the right"


def test_without_matplotlib_a_report_names_the_extra_and_its_text_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_matplotlib(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    folder = make_run(tmp_path)
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(MissingExtra, match=r'pip install "harp-prune\[report\]"'):
        html.build([folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(html.build([folder], tmp_path / "out", ["json", "md"])) == 2
