"""Charts, drawn by matplotlib: the pictures of runs and studies as files, and the figures of the HTML report.

A `Chart` says what is drawn. `inline` makes SVG for a page: text stays text, colours become variables of the page's
style sheet (so that they follow light and dark mode), and every mark has a tooltip.
"""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from harp.errors import MissingExtra
from harp.reports.tables import count_text
from harp.system import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind people can tell apart, without its yellow, which is lost on white.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b1d21")
_MARKERS = "osD^vP<>"
_DASHES = ("-", "--", ":")  # the three numbers have no common factor: 168 styles before one is used again
_INK, _SOFT, _AXIS, _GRID, _TINT, _LEVEL = "#1b1d22", "#5b616b", "#9a9fa8", "#ececef", "#f3f6f9", "#6b7078"
_NAMES = {_INK: "ink", _SOFT: "soft", _AXIS: "axis", _GRID: "grid", _TINT: "tint", _LEVEL: "level", "#ffffff": "card"}
_NAMES |= {colour: f"c{number}" for number, colour in enumerate(_COLOURS)}  # variables of the page's style sheet
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")  # characters that SVG can't hold
_WIDTH = 360  # of a drawing in a page, in pixels: readable one to one on a phone
_NAME = 22  # letters of a row's name
_TITLE = 120  # letters in a line of a file's title


@dataclass(frozen=True)
class Series:
    """Points of one style. `x` may be the numbers of rows; values that are None or not finite are not drawn."""

    name: str
    style: int
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()  # ends of intervals
    high: Sequence[float | None] = ()
    rings: Sequence[int] = ()  # indices of points with a ring around them
    labels: Sequence[str] = ()  # texts at the ends of bars


@dataclass(frozen=True)
class Level:
    """A dashed line at a value, with an interval as a band, such as the accuracy of the dense network."""

    value: float
    text: str
    half: float = 0.0


@dataclass(frozen=True)
class Chart:
    """One drawing. With `rows`, names stand at the left and values run along the horizontal axis."""

    title: str
    x: str  # labels of the axes
    y: str
    series: Sequence[Series]
    rows: Sequence[str] = ()
    kind: str = "lines"  # or marks, bars, histograms
    log: bool = False  # the horizontal axis
    budgets: Sequence[float] = ()  # ticks of a reversed logarithmic axis: small budgets are at the right
    unit: str = ""  # of the values, in tooltips; values in " %" stay within 0 and 100
    whole: bool = False  # show all from 0 to 100
    limits: tuple[float, float] | None = None  # of the horizontal axis
    marked: bool = True
    levels: Sequence[Level] = ()
    stages: Sequence[tuple[str, int]] = ()  # parts of the horizontal axis, by name and number of epochs


def shorten(text: str, most: int) -> str:
    """A long name without its middle."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def draw(
    path: Path,
    title: str,
    layers: Sequence[Mapping[str, Any]],
    stages: Mapping[str, Sequence[Mapping[str, Any]]],
    kind: str = "weights",
) -> None:
    """Draw the rates of the layers beside the accuracy over the epochs of all stages, and save the picture.

    `kind` is what the layers count: weights or channels.
    """
    rates = [100 * layer["kept"] / layer["size"] for layer in layers]
    whole = 100 * sum(layer["kept"] for layer in layers) / sum(layer["size"] for layer in layers)
    channels = kind == "channels"
    labels = [f"{layer['kept']:,}" + (f" of {layer['size']:,}" if channels else "") for layer in layers]
    names = [layer["name"].removesuffix(".weight") for layer in layers]
    what = (
        "channels kept, by the layer that reads them (%)" if channels else "weights kept in each layer (%, log scale)"
    )
    left = Chart(
        title,
        f"{what}; dashed: whole network, {whole:.3g} %",
        "",
        [Series(kind, 1, range(len(layers)), rates, labels=labels)],
        names,
        "bars",
        log=not channels,
        whole=channels,
        levels=[Level(whole, "")],
    )
    records = [record for history in stages.values() for record in history]
    epochs = range(1, len(records) + 1)
    right = Chart(
        title,
        "epoch",
        "accuracy on held-out images (%)",
        [
            Series(f"{key} accuracy", style, epochs, [100 * r[key] if key in r else None for r in records])
            for key, style in (("natural", 9), ("robust", 0))  # green and orange, both solid
            if any(key in record for record in records)
        ],
        whole=True,
        marked=False,
        stages=[(name, len(history)) for name, history in stages.items() if history],
    )
    figure = _titled(title, max(3.2, 0.24 * len(layers) + 1.4))
    for axes, chart in zip(figure.subplots(1, 2, width_ratios=(3, 2)), (left, right), strict=True):
        _draw(axes, chart, 7)
    if right.series:
        figure.axes[1].legend(fontsize=7, frameon=False, loc="best")
    _save(figure, path)


def draw_study(folder: Path, outcome: Mapping[str, Any]) -> list[Path]:
    """Draw the results of a study, accuracy over sparsity, as PNG and SVG; needs matplotlib."""
    paths = [folder / f"robust.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        title = f"{outcome['study']}: {outcome['model']} on {outcome['data']}"
        draw_comparison(path, title, outcome["rows"], outcome["attack"], outcome["unit"])
    return paths


def draw_comparison(
    path: Path, title: str, rows: Sequence[Mapping[str, Any]], attack: str, unit: str = "weights"
) -> None:
    """Draw robust and natural accuracy over what the budget counts (`unit`), one line per method, and save the picture.

    `rows` are those of `harp.experiments.table`: within a budget the best is first, and so it is in the legend.
    """
    measured = [row for row in rows if row["robust"] is not None]
    methods = list(dict.fromkeys(row["method"] for row in sorted(measured, key=lambda row: row["keep"] or 2.0)))
    budgets = sorted({100 * row["keep"] for row in measured if row["keep"] is not None})
    figure = _titled(title, max(4.4, 0.2 * len(methods) + 1.0))
    for axes, key, name in zip(
        figure.subplots(1, 2), ("robust", "natural"), (f"robust ({attack})", "natural"), strict=True
    ):
        series, levels = [], []
        for style, method in enumerate(methods):
            own = [row for row in measured if row["method"] == method]
            values, halves = [100 * row[key] for row in own], [100 * _half(row[f"{key}_half"]) for row in own]
            if own[0]["keep"] is None:
                levels.append(Level(values[0], method, halves[0]))
                continue
            low, high = ([v + sign * half for v, half in zip(values, halves, strict=True)] for sign in (-1, 1))
            series.append(Series(method, style, [100 * row["keep"] for row in own], values, low, high))
        x, y = f"{unit} kept (%, log scale)", f"accuracy, {name} (%)"
        _draw(axes, Chart(title, x, y, series, log=True, budgets=budgets, unit=" %", levels=levels), 7)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    _save(figure, path)


def _half(half: float | None) -> float:
    return 0.0 if half is None or math.isnan(half) else half


def inline(chart: Chart, title: str) -> str:
    """A chart of a figure as SVG inside a page."""
    row = {"bars": 9, "marks": 8, "lines": 5, "histograms": 0}[chart.kind] * len(chart.series)
    height = 46 + max(19 if chart.kind == "histograms" else 15, row) * len(chart.rows) if chart.rows else 225
    figure = _figure(_WIDTH / 72, height / 72, layout="constrained")
    return _svg(figure, f"{title}, {chart.title}".strip(", "), _draw(figure.subplots(), chart, 9))


@cache
def swatch(style: int, kind: str) -> str:
    """The style of a series as a legend shows it."""
    figure = _figure(28 / 72, 13 / 72)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 2), ylim=(0, 2))
    axes.set_axis_off()
    if kind == "bars":
        axes.barh([1], [1.4], left=0.3, height=1.3, color=_colour(style))
    else:
        axes.plot([0.1, 1, 1.9], [1, 1, 1], markevery=[1], **_style(style, kind == "lines"))
    return _svg(figure, "", [])


def _figure(width: float, height: float, **options: Any) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('pictures need matplotlib: pip install "harp-prune[report]"') from error
    return Figure(figsize=(width, height), **options)


def _titled(title: str, height: float) -> "Figure":
    lines = wrap(title, _TITLE)
    figure = _figure(11, height + 0.2 * (len(lines) - 1), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=11)
    return figure


def _save(figure: "Figure", path: Path) -> None:
    with files.atomic(path) as temporary:
        _write(figure, temporary, path.suffix[1:], dpi=130)


def _write(figure: "Figure", file: Path | io.StringIO, kind: str, **options: Any) -> None:
    """Write a figure; a dollar sign in a name starts no formula, and letters that the font lacks cause no warning."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(file, format=kind, **options)


def _colour(style: int) -> str:
    return _COLOURS[style % len(_COLOURS)]


def _style(number: int, joined: bool, marked: bool = True) -> dict[str, Any]:
    mark = {"marker": _MARKERS[number % len(_MARKERS)] if marked else "", "markersize": 6, "markeredgecolor": "#ffffff"}
    line = {"color": _colour(number), "linestyle": _DASHES[number % len(_DASHES)] if joined else "", "linewidth": 1.5}
    return {**mark, **line, "markeredgewidth": 0.7}


def _draw(axes: "Axes", chart: Chart, size: float) -> list[list[str]]:
    """Draw a chart; return the tooltips, a list for each group of marks `mark-NUMBER`."""
    tips: list[list[str]] = []
    _draw_frame(axes, chart, size)
    if chart.budgets:
        _show_budgets(axes, chart)  # before anything is drawn: matplotlib can't scale a logarithmic axis to one point
    {"bars": _draw_bars, "histograms": _draw_histograms}.get(chart.kind, _draw_points)(axes, chart, size, tips)
    line, band = (axes.axvline, axes.axvspan) if chart.rows else (axes.axhline, axes.axhspan)
    for level in chart.levels:
        line(level.value, color=_LEVEL, linestyle="--", linewidth=1.2, label=level.text or "_")
        if level.half:
            band(level.value - level.half, level.value + level.half, color=_LEVEL, alpha=0.13, linewidth=0)
        if level.text:
            place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(level.text, (1, level.value), (0, 2), ha="right", fontsize=size, color=_SOFT, **place)
    _set_limits(axes, chart)
    for label, name in zip(axes.get_yticklabels() if chart.rows else (), chart.rows, strict=True):
        label.set_gid(f"mark-{len(tips)}")
        tips.append([name])
    return tips


def _draw_frame(axes: "Axes", chart: Chart, size: float) -> None:
    """Labels, grid, names of rows and stages."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_AXIS)
    axes.patch.set_visible(False)
    axes.tick_params(labelsize=size, labelcolor=_SOFT, color=_AXIS, left=False)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if chart.rows else "y", color=_GRID, linewidth=0.8)
    axes.set_xlabel(chart.x, fontsize=size, color=_INK)
    axes.set_title(chart.y, fontsize=size, color=_INK, loc="left", pad=size + 8 if chart.stages else 6)
    axes.set_xscale("log" if chart.log else "linear")
    if chart.rows:
        axes.set_yticks(range(len(chart.rows)), [shorten(name, _NAME) for name in chart.rows], color=_INK)
        axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    for row in range(1, len(chart.rows), 2):  # every other row is shaded, to lead the eye from the name to the mark
        axes.axhspan(row - 0.5, row + 0.5, color=_TINT, linewidth=0, zorder=0)
    start, total = 0.5, sum(epochs for _, epochs in chart.stages)
    for name, epochs in chart.stages:
        letters = int(0.85 * epochs / total * _WIDTH / (0.6 * size))
        if letters >= min(4, len(name)):
            place = (start + epochs / 2, 1.01)
            transform = axes.get_xaxis_transform()
            axes.text(*place, shorten(name, letters), ha="center", fontsize=size, color=_SOFT, transform=transform)
        start += epochs
        axes.axvline(start, color=_AXIS, linewidth=0.8, linestyle=":")


def _set_limits(axes: "Axes", chart: Chart) -> None:
    """The ends and the ticks of the axes, once everything is drawn."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    set_limits, (low, high) = (axes.set_xlim, axes.get_xlim()) if chart.rows else (axes.set_ylim, axes.get_ylim())
    if chart.whole:
        set_limits(0, 120 if any(series.labels for series in chart.series) else 100)
    elif chart.kind != "histograms":
        smallest = axes.dataLim.x0 if chart.rows else axes.dataLim.y0
        set_limits(low if smallest < 0 else max(low, 0.0), min(high, 100.0) if chart.unit == " %" else high)
    for axis in (axes.xaxis,) if chart.rows else (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _tick(value))
    if chart.limits is not None:
        axes.set_xlim(chart.limits)
    if chart.budgets:
        _show_budgets(axes, chart)
    elif chart.log:
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 30 else (1.0, 2.0, 5.0), numticks=7))
    elif chart.stages:
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.set_xlim(0.5, 0.5 + sum(epochs for _, epochs in chart.stages))
    axes.minorticks_off()


def _tick(value: float) -> str:
    return count_text(round(value)) if value >= 10_000 else f"{value:.6g}".replace("-", "−")


def _show_budgets(axes: "Axes", chart: Chart) -> None:
    """Ticks at the budgets, the smallest on the right."""
    room = _gap(chart.budgets) ** 0.5
    shares = [*chart.budgets, *(share for series in chart.series for share in series.x)]
    axes.set_xticks(chart.budgets, [f"{budget:.10g}" for budget in chart.budgets])
    axes.set_xlim(max(shares) * room, min(shares) / room)


def _gap(budgets: Sequence[float]) -> float:
    """The factor between two budgets: methods of one budget are drawn side by side within a part of it."""
    return min([4.0, *(high / low for low, high in pairwise(sorted(budgets)) if high / low > 1.1)])


def _known(values: Sequence[float | None], positive: bool = False) -> list[float]:
    """Values for drawing: what is missing, not finite or not on a logarithmic axis is NaN."""
    finite = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    return [math.nan if positive and value <= 0 else value for value in finite]


def _errors(series: Series, values: Sequence[float]) -> list[list[float]] | None:
    """How far the intervals reach below and above the values."""
    if not series.low or not series.high:
        return None
    low, high = _known(series.low), _known(series.high)
    return [
        [max(0.0, value - end) for value, end in zip(values, low, strict=True)],
        [max(0.0, end - value) for value, end in zip(values, high, strict=True)],
    ]


def _draw_points(axes: "Axes", chart: Chart, size: float, tips: list[list[str]]) -> None:
    for order, series in enumerate(chart.series):
        aside = order / (len(chart.series) - 1) - 0.5 if len(chart.series) > 1 else 0.0  # so that none hides another
        places = [place + 0.6 * aside if chart.rows else place for place in series.x]
        if chart.budgets:
            places = [place / _gap(chart.budgets) ** (0.35 * aside) for place in series.x]
        values = _known(series.y, positive=chart.log and bool(chart.rows))
        shown = [index for index, value in enumerate(values) if math.isfinite(value)]
        style = _style(series.style, chart.kind == "lines", chart.marked or len(shown) == 1)
        error: dict[str, Any] = {"xerr" if chart.rows else "yerr": _errors(series, values)}
        across, up = (values, places) if chart.rows else (places, values)
        drawn = axes.errorbar(across, up, **error, **style, elinewidth=1, capsize=2, label=series.name)
        drawn[0].set_gid(f"mark-{len(tips)}")
        tips.append([_tip(chart, series, index) for index in shown])
        rings = [index for index in series.rings if index in shown]
        if rings:
            centres = [across[index] for index in rings], [up[index] for index in rings]
            axes.scatter(*centres, s=100, facecolors="none", edgecolors=_INK, gid=f"mark-{len(tips)}", zorder=4)
            tips.append([_tip(chart, series, index) for index in rings])


def _tip(chart: Chart, series: Series, index: int) -> str:
    texts = [
        "–" if value is None else f"{value:.1f}" if chart.unit == " %" and not chart.rows else f"{value:,.4g}"
        for value in (series.y[index], *(ends[index] for ends in (series.low, series.high) if ends))
    ]
    place = chart.rows[round(series.x[index])] if chart.rows else f"{chart.x.split(' (')[0]} {series.x[index]:.4g}"
    interval = f" ({texts[1]} – {texts[2]})" if len(texts) == 3 and "–" not in texts else ""
    return f"{series.name}, {place}: {texts[0]}{chart.unit}{interval}"


def _draw_bars(axes: "Axes", chart: Chart, size: float, tips: list[list[str]]) -> None:
    thick = 0.76 / max(1, len(chart.series))
    if chart.log:
        axes.set_xlim(min([value for series in chart.series for value in series.y if value], default=1.0) / 2, 400)
    for order, series in enumerate(chart.series):
        values = _known(series.y)
        places = [row + thick * (order - (len(chart.series) - 1) / 2) for row in series.x]
        error: dict[str, Any] = {"xerr": _errors(series, values), "ecolor": _INK}
        for index, bar in enumerate(axes.barh(places, values, thick * 0.9, color=_colour(series.style), **error)):
            bar.set_gid(f"mark-{len(tips)}")
            tips.append([_tip(chart, series, index)])
        for place, value, label in zip(places, values, series.labels, strict=False):
            axes.annotate(label, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=size)


def _draw_histograms(axes: "Axes", chart: Chart, size: float, tips: list[list[str]]) -> None:
    """One row per series, with heights relative to the highest."""
    for row, series in enumerate(chart.series):
        heights = _known(series.y)
        tops = [row + 0.45 - 0.85 * height / max([1e-12, *heights]) for height in heights]
        axes.fill_between(
            series.x, row + 0.45, tops, step="mid", color=_colour(1), linewidth=0, gid=f"mark-{len(tips)}"
        )
        tips.append([series.name])
    axes.set_xlim(-1, 1)


def _svg(figure: "Figure", title: str, tips: Sequence[Sequence[str]]) -> str:
    """A figure as an element of a page, without namespaces, metadata, fonts and clipping."""
    import matplotlib

    figure.patch.set_visible(False)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "harp"}):
        _write(figure, file, "svg", metadata={"Date": None})
    root = ElementTree.fromstring(_CONTROL.sub("", file.getvalue()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        kept = [(key, text) for key, text in element.items() if key != "clip-path" and "rotate(-0" not in text]
        element.attrib = {key.rpartition("}")[2]: text for key, text in kept}
        for child in [child for child in element if child.tag.endswith(("metadata", "style", "clipPath"))]:
            element.remove(child)
        name = element.attrib.pop("id", "") if element.tag == "g" else ""
        if name.startswith("mark-"):
            element.set("class", "mark")
            _add_tooltips(element, tips[int(name.removeprefix("mark-"))])
        for key in {"d", "x", "y"} & element.attrib.keys():
            element.set(key, re.sub(r"(\.\d)\d+", r"\1", element.attrib[key]))
        if "style" in element.attrib:
            style = re.sub(r"font-family:[^;]*; ?", "", element.attrib["style"])
            element.set("style", re.sub(r"#[0-9a-f]{6}", lambda colour: f"var(--{_NAMES[colour[0]]})", style))
    role = {"role": "img", "aria-label": title} if title else {"aria-hidden": "true"}
    root.attrib = {"viewBox": root.attrib["viewBox"], **role}
    return _CONTROL.sub("", re.sub(r">\s+<", "><", ElementTree.tostring(root, "unicode")))


def _add_tooltips(group: ElementTree.Element, texts: Sequence[str]) -> None:
    """Give every mark of a group its text; a group without single marks gets the first one."""
    marks = [element for element in group.iter() if element.tag.endswith("use")]
    for element, text in zip(marks if len(marks) == len(texts) else [group], texts, strict=False):
        note = ElementTree.Element("title")
        note.text = text
        element.insert(0, note)
