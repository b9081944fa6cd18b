"""Charts as SVG: text stays text, colours are variables of the page, and every mark has a shape as well as a colour.

All drawings are 360 units wide, so that they are readable one to one on a telephone and larger on a desk.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from harp.reports.html import scale
from harp.reports.html.scale import Scale

WIDTH = 360
COLOURS = 7  # of the page's palette: style n has colour n mod 7, marker n mod 8, dash n mod 3
_MARKERS = 8
_DASHES = 3
_SIZE = 10.0  # of the text, as in the style sheet


@dataclass(frozen=True)
class Point:
    """A value with its interval (where there is one) and what is said of it on touch."""

    x: float
    y: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Series:
    """Points that belong together, and the number of their style."""

    name: str
    number: int
    points: Sequence[Point]
    ring: Sequence[int] = ()  # indices of points that are marked


@dataclass(frozen=True)
class Axis:
    """A scale with a label; ticks at given values if the round ones are not what is wanted."""

    label: str
    scale: Scale
    ticks: Sequence[float] | None = None

    def marks(self, most: int = 6) -> list[float]:
        """The values to write along the axis."""
        return self.scale.ticks(most) if self.ticks is None else list(self.ticks)


@dataclass(frozen=True)
class Level:
    """A horizontal line at a value, such as the dense network's."""

    value: float
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True)
class Border:
    """A part of the x axis with a name, such as a stage of a training."""

    start: float
    end: float
    text: str


def style(number: int) -> str:
    """The classes of a style."""
    return f"s{number % COLOURS} d{number % _DASHES}"


def wide(text: str, size: float = _SIZE) -> float:
    """About how wide a text is; rather too much than too little."""
    return len(text) * size * 0.58


def shorten(text: str, most: int) -> str:
    """A long name without its middle."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def marker(number: int, x: float, y: float, text: str = "", filled: bool = True) -> str:
    """The mark of a style at a place."""
    shapes = (
        "m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",  # disc
        "m-3-3h6v6h-6z",  # square
        "m0-4.4l3.8 4.4l-3.8 4.4l-3.8-4.4z",  # diamond
        "m0-4l4 7h-8z",  # triangle
        "m0 4l4-7h-8z",  # triangle, pointing down
        "m-1.3-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",  # plus
        "m-4 0l7-4v8z",  # triangle, pointing left
        "m4 0l-7-4v8z",  # triangle, pointing right
    )
    title = f"<title>{escape(text)}</title>" if text else ""
    kind = "m" if filled else "m o"
    return f'<path class="{kind}" d="M{_n(x)} {_n(y)}{shapes[number % _MARKERS]}">{title}</path>'


def swatch(number: int, joined: bool = True, filled: bool = False) -> str:
    """A style as it stands in a legend."""
    if filled:
        mark = f'<rect class="b b{number % 2}" x="4" y="2" width="18" height="8"/>'
    else:
        mark = ('<path class="l" d="M1 6h24"/>' if joined else "") + marker(number, 13, 6)
    return f'<svg class="swatch {style(number)}" viewBox="0 0 26 12" aria-hidden="true">{mark}</svg>'


def curves(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    levels: Sequence[Level] = (),
    borders: Sequence[Border] = (),
    marked: bool = True,
    height: float = 230,
) -> str:
    """Lines over a continuous axis, with error bars where points have intervals."""
    ticks = y.marks(5)
    left = max(wide(scale.text(tick)) for tick in [*ticks, 0.0]) + 10
    plot = _Plot(x, y, left=left, top=32 if borders else 24, height=height)  # the names of borders need a line
    plot.horizontal(ticks)
    plot.vertical(_apart(x, plot))
    for border in borders:
        plot.border(border, last=border is borders[-1])
    for level in levels:
        plot.level(level)
    for one in series:
        plot.series(one, marked)
    return plot.svg(title)


def rows(title: str, names: Sequence[str], series: Sequence[Series], x: Axis, *, joined: bool = False) -> str:
    """Marks in rows, one row a name: the x of a point is the number of its row, its y the value along the axis."""
    plot = _rows(names, x, (5 if joined else 8) * max(1, len(series)))
    gap = (0.5 if joined else 0.72) / max(1, len(series))  # side by side: equal values would hide each other
    for order, one in enumerate(series):
        shift = gap * (order - (len(series) - 1) / 2)
        plot.across(one, shift, joined)
    return plot.svg(title)


def bars(title: str, names: Sequence[str], series: Sequence[Series], x: Axis) -> str:
    """Bars in rows, one row a name, one bar a series."""
    plot = _rows(names, x, 9 * max(1, len(series)))
    thick = 0.76 / max(1, len(series))
    for order, one in enumerate(series):
        plot.bars(one, thick * (order - (len(series) - 1) / 2), thick)
    return plot.svg(title)


def histogram(title: str, counts: Sequence[int], low: float, high: float) -> str:
    """Counts in equal steps from low to high, drawn small."""
    width, height, bottom = 160.0, 78.0, 62.0
    most, step = max([1, *counts]), (width - 16) / max(1, len(counts))
    path = f"M8 {_n(bottom)}" + "".join(f"V{_n(bottom - 52 * count / most)}h{step:.2f}" for count in counts)
    parts = [f'<path class="h" d="{path}V{_n(bottom)}z"/>', f'<path class="a" d="M8 {_n(bottom)}h{_n(width - 16)}"/>']
    for value, anchor, place in ((low, "start", 8.0), (0.0, "middle", 0.0), (high, "end", width - 8)):
        if value == 0 and not low < 0 < high:
            continue
        at = place or 8 + (width - 16) * (0 - low) / (high - low)
        near = min(abs(at - 8), abs(width - 8 - at)) < 44
        if not (value == 0 and near):
            parts.append(f'<text class="t" x="{_n(at)}" y="74" text-anchor="{anchor}">{_short(value)}</text>')
    return _svg(title, width, height, parts)


class _Plot:
    """A frame with two axes and what is drawn in it."""

    def __init__(
        self, x: Axis, y: Axis, *, left: float, top: float = 24, bottom: float = 38, height: float = 230
    ) -> None:
        self.x, self.y = x, y
        self.left, self.right, self.top, self.bottom = left, WIDTH - 12.0, top, height - bottom
        self.height = height
        self.parts: list[str] = []

    def px(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.x.scale.at(value)

    def py(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.y.scale.at(value)

    def svg(self, title: str) -> str:
        self.parts.append(
            f'<text class="x" x="{_n((self.left + self.right) / 2)}" y="{_n(self.height - 5)}" text-anchor="middle">'
            f"{escape(self.x.label)}</text>"
        )
        if self.y.label:
            self.parts.append(f'<text class="y" x="2" y="10">{escape(self.y.label)}</text>')
        return _svg(title, WIDTH, self.height, self.parts)

    def horizontal(self, ticks: Iterable[float]) -> None:
        for tick in ticks:
            at = self.py(tick)
            self.parts.append(f'<path class="g" d="M{_n(self.left)} {_n(at)}H{_n(self.right)}"/>')
            place = f'x="{_n(self.left - 5)}" y="{_n(at + 3.5)}"'
            self.parts.append(f'<text class="t" {place} text-anchor="end">{scale.text(tick)}</text>')

    def vertical(self, ticks: Iterable[float], grid: bool = False) -> None:
        self.parts.append(f'<path class="a" d="M{_n(self.left)} {_n(self.bottom)}H{_n(self.right)}"/>')
        for tick in ticks:
            at = self.px(tick)
            line = f"M{_n(at)} {_n(self.top)}V{_n(self.bottom)}" if grid else f"M{_n(at)} {_n(self.bottom)}v4"
            self.parts.append(f'<path class="{"g" if grid else "a"}" d="{line}"/>')
            place = f'x="{_n(at)}" y="{_n(self.bottom + 14)}"'
            self.parts.append(f'<text class="t" {place} text-anchor="middle">{scale.text(tick)}</text>')

    def border(self, border: Border, last: bool) -> None:
        start, end = self.px(border.start), self.px(border.end)
        if not last:
            self.parts.append(f'<path class="k" d="M{_n(end)} {_n(self.top)}V{_n(self.bottom)}"/>')
        most = int((end - start - 6) / (_SIZE * 0.58))
        if most >= min(4, len(border.text)):
            name = escape(shorten(border.text, most))
            self.parts.append(
                f'<text class="t" x="{_n((start + end) / 2)}" y="{_n(self.top - 3)}" text-anchor="middle">{name}</text>'
            )

    def level(self, level: Level) -> None:
        at = self.py(level.value)
        if level.low is not None and level.high is not None:
            top, bottom = self.py(level.high), self.py(level.low)
            self.parts.append(
                f'<rect class="band" x="{_n(self.left)}" y="{_n(top)}" width="{_n(self.right - self.left)}" '
                f'height="{_n(max(0.0, bottom - top))}"/>'
            )
        self.parts.append(f'<path class="level" d="M{_n(self.left)} {_n(at)}H{_n(self.right)}"/>')
        above = at - 4 if at - 14 > self.top else at + 12
        self.parts.append(
            f'<text class="t" x="{_n(self.right - 2)}" y="{_n(above)}" text-anchor="end">{escape(level.text)}</text>'
        )

    def series(self, one: Series, marked: bool) -> None:
        inside = [point for point in one.points if _finite(point.y)]
        parts = [self._path([[(self.px(p.x), self.py(p.y or 0.0)) for p in run] for run in _runs(one.points)])]
        for point in inside:
            if _finite(point.low) and _finite(point.high):
                at, low, high = self.px(point.x), self.py(point.low or 0.0), self.py(point.high or 0.0)
                parts.append(
                    f'<path class="w" d="M{_n(at)} {_n(low)}V{_n(high)}m-2.5 0h5M{_n(at - 2.5)} {_n(low)}h5"/>'
                )
        if marked or len(inside) == 1:
            parts += [marker(one.number, self.px(p.x), self.py(p.y or 0.0), p.text) for p in inside]
        for index in one.ring:
            point = one.points[index]
            if _finite(point.y):
                place = f'cx="{_n(self.px(point.x))}" cy="{_n(self.py(point.y or 0.0))}"'
                parts.append(f'<circle class="ring" {place} r="5"><title>{escape(point.text)}</title></circle>')
        self.parts.append(f'<g class="{style(one.number)}">{"".join(parts)}</g>')

    def _path(self, runs: Sequence[Sequence[tuple[float, float]]]) -> str:
        path = "".join("M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in run) for run in runs if len(run) > 1)
        return f'<path class="l" d="{path}"/>' if path else ""

    def across(self, one: Series, shift: float, joined: bool) -> None:
        """Marks of a chart of rows: values along x."""
        known = [point for point in one.points if _finite(point.y)]
        parts = []
        if joined:
            parts.append(
                self._path([[(self.px(p.y or 0.0), self.py(p.x + shift)) for p in run] for run in _runs(one.points)])
            )
        for point in known:
            at = self.py(point.x + shift)
            if _finite(point.low) and _finite(point.high):
                low, high = self.px(point.low or 0.0), self.px(point.high or 0.0)
                parts.append(f'<path class="w" d="M{_n(low)} {_n(at)}H{_n(high)}m0-2.5v5M{_n(low)} {_n(at - 2.5)}v5"/>')
            parts.append(marker(one.number, self.px(point.y or 0.0), at, point.text))
        self.parts.append(f'<g class="{style(one.number)}">{"".join(parts)}</g>')

    def bars(self, one: Series, shift: float, thick: float) -> None:
        """Bars of a chart of rows, from the axis's beginning."""
        parts = []
        for point in one.points:
            if not _finite(point.y):
                continue
            top, bottom = self.py(point.x + shift - thick / 2), self.py(point.x + shift + thick / 2)
            end = self.px(point.y or 0.0)
            parts.append(
                f'<rect class="b b{one.number % 2}" x="{_n(self.left)}" y="{_n(top)}" '
                f'width="{_n(max(0.8, end - self.left))}" '
                f'height="{_n(bottom - top - 1)}"><title>{escape(point.text)}</title></rect>'
            )
            if _finite(point.low) and _finite(point.high):
                low, high, middle = self.px(point.low or 0.0), self.px(point.high or 0.0), (top + bottom - 1) / 2
                parts.append(f'<path class="e" d="M{_n(low)} {_n(middle)}H{_n(high)}"/>')
        self.parts.append(f'<g class="{style(one.number)}">{"".join(parts)}</g>')


def _rows(names: Sequence[str], x: Axis, thick: float) -> _Plot:
    """The frame of a chart of rows: names at the left, the axis below."""
    most = 22
    shown = [shorten(name, most) for name in names]
    each = max(15.0, thick)
    y = Axis("", Scale(-0.5, max(0.5, len(names) - 0.5), reverse=True))
    left = min(max([wide(name) for name in shown], default=0.0) + 8, 0.42 * WIDTH)
    plot = _Plot(x, y, left=left, top=6, height=each * len(names) + 6 + 38)
    for number in range(1, len(names), 2):  # every other row is shaded, to lead the eye from the name to the marks
        top, deep = plot.py(number - 0.5), plot.py(number + 0.5) - plot.py(number - 0.5)
        plot.parts.append(f'<rect class="stripe" x="0" y="{_n(top)}" width="{WIDTH}" height="{_n(deep)}"/>')
    plot.vertical(_apart(x, plot), grid=True)
    for number, (name, full) in enumerate(zip(shown, names, strict=True)):
        title = f"<title>{escape(full)}</title>" if name != full else ""
        plot.parts.append(
            f'<text class="n" x="{_n(left - 6)}" y="{_n(plot.py(number) + 3.5)}" text-anchor="end">'
            f"{escape(name)}{title}</text>"
        )
    return plot


def _apart(x: Axis, plot: _Plot) -> list[float]:
    """The ticks of the x axis that have room beside each other."""
    kept: list[float] = []
    ends: list[tuple[float, float]] = []
    for tick in x.marks():
        half = wide(scale.text(tick)) / 2 + 3
        start, end = plot.px(tick) - half, plot.px(tick) + half
        if end - 3 <= WIDTH and start + 3 >= 0 and all(end <= other or start >= after for other, after in ends):
            kept.append(tick)
            ends.append((start, end))
    return kept


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Points cut where one is missing: a line must not bridge what was not measured."""
    known = [number for number, point in enumerate(points) if _finite(point.y)]
    cuts = [0, *(place + 1 for place, (a, b) in enumerate(pairwise(known)) if b - a > 1), len(known)]
    return [[points[number] for number in known[start:end]] for start, end in pairwise(cuts)]


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")
