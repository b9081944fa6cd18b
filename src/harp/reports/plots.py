"""Charts, drawn by matplotlib: the pictures of runs and studies as files, and the figures of the HTML report.

A `Chart` says what is drawn. `inline` makes SVG for a page: text stays text, colours become variables of the page's
style sheet (so that they follow light and dark mode), and every mark has a tooltip.
"""

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from harp.errors import MissingExtra, RecipeError
from harp.evaluation.accuracy_drop import CHANCE
from harp.reports.tables import count_text
from harp.system import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind people can tell apart, without its yellow, which is lost on white.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a818c")
_MARKERS = "osD^vP<>"
_DASHES = ("-", "--", ":")  # the three numbers have no common factor: 168 styles before one is used again
_INK, _SOFT, _AXIS, _GRID, _TINT, _LEVEL = "#1b1d22", "#5b616b", "#9a9fa8", "#ececef", "#f3f6f9", "#6b7078"
_NAMES = {_INK: "ink", _SOFT: "soft", _AXIS: "axis", _GRID: "grid", _TINT: "tint", _LEVEL: "level", "#ffffff": "card"}
_NAMES |= {colour: f"c{number}" for number, colour in enumerate(_COLOURS)}  # variables of the page's style sheet
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")  # characters that SVG can't hold
_WIDTH = 310  # of a drawing in a page, in pixels: readable one to one on a phone
_SIZE = 9.5  # of its letters
_NAME = 25  # letters in a line of a row's name, which has two lines at most
_LABEL = 38  # letters in a line below the axis of a drawing with rows; without them there is more room
_TITLE = 52  # letters in a line of a file's title
_DPI = 240  # of a picture in a file: three times as sharp as a page on a phone


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
    hollow: Sequence[int] = ()  # indices of points that must not look like the others
    labels: Sequence[str] = ()  # texts at the right of the rows


@dataclass(frozen=True)
class Level:
    """A dashed line at a value, with an interval as a band, such as the accuracy of the dense network."""

    value: float
    text: str
    half: float = 0.0
    left: bool = False  # where the text stands


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


def _lines(name: str) -> list[str]:
    """A row's name on one line or two, broken after a separator if there is one near the middle."""
    name = shorten(name, 2 * _NAME - 2)
    if len(name) <= _NAME:
        return [name]
    breaks = [place for place in range(len(name) - _NAME, _NAME + 1) if name[place - 1] in " ._-/:,"]
    cut = min(breaks, key=lambda place: abs(2 * place - len(name)), default=_NAME)
    return [name[:cut].rstrip(), name[cut:]]


@dataclass(frozen=True)
class Measured:
    """A network of a comparison, in per cent: its accuracies by test, each with the ends of its interval."""

    method: str
    style: int
    share: float | None  # that is kept; None: dense
    results: Mapping[str, tuple[float, float, float] | None] = field(default_factory=dict)
    remark: str = ""  # why it must not look like the others, such as CHANCE


def comparison(
    networks: Sequence[Measured], tests: Sequence[str], unit: str, chance: float | None = None
) -> list[Chart]:
    """Networks side by side: bars if all have one budget, else a chart for each test with a line for each method.

    Tests are named as in a sentence ("without attack", "under pgd-20"). `chance` is the accuracy, in per cent, of
    always the same answer.
    """
    budgets = sorted({float(f"{network.share:.3g}") for network in networks if network.share is not None})
    constant = [] if chance is None else [Level(chance, "always the same answer", left=True)]
    if len(budgets) < 2:
        rows = [f"{n.method}, {n.remark}" if n.remark else n.method for n in networks]
        series = [_tested(test, style, range(len(rows)), networks, test) for style, test in enumerate(tests)]
        below = "accuracy (%)" + "; dashed: always the same answer" * bool(constant)
        return [Chart("", below, "", series, rows, "bars", unit=" %", whole=True, levels=constant)]
    charts = []
    for test in tests:
        by_method: dict[str, list[Measured]] = {}
        levels = list(constant)
        for network in networks:
            if network.share is not None:
                by_method.setdefault(network.method, []).append(network)
            elif (result := network.results.get(test)) is not None:
                levels.append(Level(result[0], network.method, _half(result[2] - result[1]) / 2))
        series = [
            _tested(method, own[0].style, [network.share or 0.0 for network in own], own, test)
            for method, own in by_method.items()
        ]
        series = [one for one in series if any(value is not None for value in one.y)]
        x = f"{unit} kept (%, log scale; {'sparser' if unit == 'weights' else 'smaller'} to the right)"
        title = f"accuracy {test} (%)"
        whole = chance is not None
        chart = Chart("", x, title, series, log=True, budgets=budgets, unit=" %", levels=levels, whole=whole)
        charts.append(chart)
    return charts


def _tested(name: str, style: int, x: Sequence[float], networks: Sequence[Measured], test: str) -> Series:
    results = [network.results.get(test) or (None, None, None) for network in networks]
    y, low, high = ([result[part] for result in results] for part in range(3))
    hollow = [index for index, network in enumerate(networks) if network.remark]
    return Series(name, style, x, y, low, high, hollow=hollow)


def layers(rows: Sequence[Mapping[str, Any]], kind: str) -> Chart:
    """The share that every layer keeps; `kind` is what it counts: weights or channels."""
    whole = 100 * sum(row["kept"] for row in rows) / sum(row["size"] for row in rows)
    channels = kind == "channels"
    what = "channels kept, by the layer that reads them (%)" if channels else "weights kept in each layer (%, log)"
    labels = [f"{row['kept']:,} of {row['size']:,}" if channels else f"{row['kept']:,}" for row in rows]
    rates = Series(kind, 1, range(len(rows)), [100 * row["kept"] / row["size"] for row in rows], labels=labels)
    names = [row["name"].removesuffix(".weight") for row in rows]
    x, levels = f"{what}; dashed: whole network, {whole:.3g} %", [Level(whole, "")]
    return Chart("", x, "", [rates], names, "bars", log=not channels, whole=True, unit=" %", levels=levels)


def training(stages: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], chosen: Sequence[int] = ()) -> Chart:
    """The accuracy on held-out images over the epochs of all stages, with rings around the `chosen` ones."""
    records = [record for _, history in stages for record in history]
    keys = [key for key in ("natural", "robust") if any(_number(record.get(key)) is not None for record in records)]
    series = []
    for key in keys:
        values = [_number(record.get(key)) for record in records]
        values = [None if value is None else 100 * value for value in values]
        style = {"natural": 9, "robust": 0}[key]  # green and orange, both solid
        rings = chosen if key == keys[-1] else ()
        series.append(Series(key, style, range(1, len(records) + 1), values, rings=rings))
    lengths = [(name, len(history)) for name, history in stages if history]
    y, marked = "accuracy on held-out images (%)", len(records) <= 30
    return Chart("", "epoch", y, series, unit=" %", whole=True, marked=marked, stages=lengths)


def _number(value: object) -> float | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]


def picture(title: str, charts: Iterable[Chart], warned: bool = False) -> "Figure":
    """Charts one below the other, readable on a phone; the title of a network that failed is orange."""
    drawn = [chart for chart in charts if chart.series]
    names = {one.name: None for chart in drawn for one in chart.series if len(chart.series) > 1}
    columns = max(1, min(4, len(names), 60 // (6 + max(map(len, names), default=0))))
    lines = [line for part in title.split("\n") for line in wrap(part, _TITLE)]
    heights = [_height(chart) / 72 for chart in drawn]
    rest = (15 * len(lines) + 16 * math.ceil(len(names) / columns)) / 72
    figure = _figure(_WIDTH / 72, sum(heights) + rest, layout="constrained")
    ink = _COLOURS[0] if warned else _INK
    figure.suptitle("\n".join(lines), fontsize=10, color=ink, x=0.02, ha="left", linespacing=1.3)
    legend: dict[str, Any] = {}
    parts = figure.subfigures(len(drawn), 1, height_ratios=heights, squeeze=False)[:, 0]  # each with its own margins
    for part, chart in zip(parts, drawn, strict=True):
        axes = part.subplots()
        _draw(axes, chart, _SIZE)
        if len(chart.series) > 1:
            legend |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if names:
        handles = [legend[name] for name in names if name in legend]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    return figure


def save(figure: "Figure", path: Path) -> Path:
    """Write a picture to a file; its ending says the format."""
    kinds = figure.canvas.get_supported_filetypes()
    if (kind := path.suffix.removeprefix(".")) not in kinds:
        raise RecipeError(f"picture {path}: the ending has to be one of {', '.join(sorted(kinds))}")
    with files.atomic(path) as temporary:
        write(figure, temporary, kind, dpi=_DPI)
    return path


def draw(
    folder: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    stages: Mapping[str, Sequence[Mapping[str, Any]]],
    kind: str = "weights",
    warned: bool = False,
) -> list[Path]:
    """Save `layers.png` and `.svg`: the rates of the layers, and the accuracy over the epochs of all stages.

    `kind` is what the layers count: weights or channels. `warned`: the network is not what was hoped for.
    """
    charts = [layers(rows, kind), training(list(stages.items()))]
    figure = picture(title, charts, warned)
    return [save(figure, folder / f"layers.{suffix}") for suffix in ("png", "svg")]


def draw_study(folder: Path, outcome: Mapping[str, Any]) -> list[Path]:
    """Save the results of a study, accuracy over sparsity, as `robust.png` and `.svg`."""
    figure = picture(*study(outcome))
    return [save(figure, folder / f"robust.{suffix}") for suffix in ("png", "svg")]


def study(outcome: Mapping[str, Any]) -> tuple[str, list[Chart]]:
    """Title and charts of a study: robust and natural accuracy of every method at every budget.

    Its rows are those of `harp.experiments.table`: within a budget the best is first, and so it is in the legend.
    """
    rows = sorted((row for row in outcome["rows"] if row["robust"] is not None), key=lambda row: row["keep"] or 2.0)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    tests = {f"under {outcome['attack']}": "robust", "without attack": "natural"}
    networks = [
        Measured(
            row["method"],
            methods.index(row["method"]),
            None if row["keep"] is None else 100 * row["keep"],
            {test: _ends(row[key], row[f"{key}_half"]) for test, key in tests.items()},
            CHANCE if row.get("at_chance") else "",
        )
        for row in rows
    ]
    title = f"{outcome['study']}: {outcome['model']} on {outcome['data']}"
    return title, comparison(networks, list(tests), outcome["unit"])


def _ends(mean: float, half: float | None) -> tuple[float, float, float]:
    width = 0.0 if half is None else _half(half)
    return 100 * mean, 100 * (mean - width), 100 * (mean + width)


def _half(half: float) -> float:
    return 0.0 if math.isnan(half) else half


def _height(chart: Chart) -> float:
    """The height of a drawing, in pixels of a page."""
    if not chart.rows:
        return 225
    bars = {"bars": 9, "marks": 8, "lines": 5, "histograms": 0}[chart.kind] * len(chart.series)
    name = 26 if any(len(_lines(row)) > 1 for row in chart.rows) else 15
    axis = 46 + 11 * (len(wrap(chart.x, _LABEL)) - 1)
    return axis + max(19 if chart.kind == "histograms" else name, bars) * len(chart.rows)


def inline(chart: Chart, title: str) -> str:
    """A chart of a figure as SVG inside a page."""
    figure = _figure(_WIDTH / 72, _height(chart) / 72, layout="constrained")
    return _svg(figure, f"{title}, {chart.title}".strip(", "), _draw(figure.subplots(), chart, _SIZE))


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


def write(figure: "Figure", file: Path | io.StringIO | io.BytesIO, kind: str, **options: Any) -> None:
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
            ends = level.value - level.half, level.value + level.half
            low, high = (min(max(end, 0.0), 100.0) for end in ends) if chart.unit == " %" else ends
            band(low, high, color=_LEVEL, alpha=0.13, linewidth=0)
        if level.text and not chart.rows:
            place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            side = "left" if level.left else "right"
            axes.annotate(
                level.text, (side == "right", level.value), (0, 2), ha=side, fontsize=size, color=_SOFT, **place
            )
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
    axes.set_xlabel("\n".join(wrap(chart.x, _LABEL)) if chart.rows else chart.x, fontsize=size, color=_INK)
    axes.set_title(chart.y, fontsize=size, color=_INK, loc="left", pad=size + 8 if chart.stages else 6)
    axes.set_xscale("log" if chart.log else "linear")
    if chart.rows:
        axes.set_yticks(range(len(chart.rows)), ["\n".join(_lines(name)) for name in chart.rows], color=_INK)
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
        set_limits(low if chart.log and chart.rows else 0, 100)
    elif chart.kind != "histograms":
        smallest = axes.dataLim.x0 if chart.rows else axes.dataLim.y0
        low = low if smallest < 0 and chart.unit != " %" else max(low, 0.0)
        set_limits(low, min(high, 100.0) if chart.unit == " %" else high)
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
        for part in (*drawn[1], *drawn[2]):  # wide intervals must not hide what they belong to
            part.set_alpha(0.5)
        tips.append([_tip(chart, series, index) for index in shown])
        hollow = [index for index in series.hollow if index in shown]
        if hollow:  # painted over their marks
            centres = [across[index] for index in hollow], [up[index] for index in hollow]
            look = {"marker": style["marker"] or "o", "facecolors": "#ffffff", "edgecolors": style["color"]}
            axes.scatter(*centres, s=36, linewidths=1.4, gid=f"mark-{len(tips)}", zorder=4, **look)
            tips.append([_tip(chart, series, index) for index in hollow])
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
    start = 0.0
    if chart.log:  # bars begin at the axis: a drawing in a page is not clipped
        start = min([value for series in chart.series for value in series.y if value], default=1.0) / 2
        axes.set_xlim(start, 100)
    for order, series in enumerate(chart.series):
        values = _known(series.y)
        places = [row + thick * (order - (len(chart.series) - 1) / 2) for row in series.x]
        error: dict[str, Any] = {"xerr": _errors(series, values), "ecolor": _INK}
        look: dict[str, Any] = {"color": _colour(series.style), "label": series.name, **error}
        widths = [max(0.0, value - start) for value in values]
        for index, bar in enumerate(axes.barh(places, widths, thick * 0.9, left=start, **look)):
            bar.set_gid(f"mark-{len(tips)}")
            if index in series.hollow:
                bar.set(facecolor="none", edgecolor=_colour(series.style), linestyle=":", linewidth=1.2)
            tips.append([_tip(chart, series, index)])
        right: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        for place, label in zip(places, series.labels, strict=False):
            axes.annotate(label, (1, place), (5, 0), va="center", fontsize=size, color=_INK, **right)


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
        write(figure, file, "svg", metadata={"Date": None})
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
