"""What a report is made of, before it is a page, a text or data: sections of tables, figures, images and code."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harp.reports.plots import Chart


class Block:
    """A part of a section."""

    @property
    def form(self) -> str:
        """The name of the template's macro for it."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Table(Block):
    """Rows of text under titles; the first column is text, the others are numbers unless `plain`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    plain: bool = False


@dataclass(frozen=True)
class Figure(Block):
    """Charts side by side, how to read them, and the numbers behind them."""

    title: str
    caption: str
    charts: Sequence[Chart]
    table: Table

    @property
    def legend(self) -> list[tuple[str, int, str]]:
        """Name, style and kind of every series; none if there is only one, or if series are rows."""
        series = {(one.name, one.style, chart.kind): None for chart in self.charts for one in chart.series}
        return list(series) if len(series) > 1 and self.charts[0].kind != "histograms" else []


@dataclass(frozen=True)
class Code(Block):
    """Text as it stands in a file."""

    text: str


@dataclass(frozen=True)
class Verdict:
    """A check, its verdict, what was found and why the check is made."""

    check: str
    verdict: str
    text: str
    why: str = ""


@dataclass(frozen=True)
class Verdicts(Block):
    """The checks of a network."""

    title: str
    items: Sequence[Verdict]


@dataclass(frozen=True)
class Attacked:
    """An image, the change by an attack, the attacked image, and the answers of the network to both."""

    images: Sequence[NDArray[np.uint8]]
    label: str
    before: str
    after: str
    gain: str
    index: int


@dataclass(frozen=True)
class Gallery(Block):
    """Attacked images."""

    title: str
    caption: str
    items: Sequence[Attacked]


@dataclass(frozen=True)
class Fold(Block):
    """Blocks that are shown on demand."""

    title: str
    blocks: Sequence[Block]


def folded(blocks: Sequence[Table | Figure | Verdicts | Gallery], what: str) -> list[Block]:
    """The first block as it is; the others behind one fold, each behind its title."""
    others = [Fold(block.title, [block]) for block in blocks[1:]]
    return [*blocks[:1], *([Fold(f"{len(others)} more {what}", others)] if others else [])]


@dataclass(frozen=True)
class Section:
    """A chapter of the report."""

    anchor: str
    title: str
    lead: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Tile:
    """A number to see first."""

    title: str
    value: str
    before: str = ""
    text: str = ""


@dataclass(frozen=True)
class Report:
    """The whole report; the tiles are of the network that `shown` names."""

    title: str
    subtitle: str
    headline: str
    tiles: Sequence[Tile]
    notes: Sequence[str]
    sections: Sequence[Section]
    foot: str
    shown: str
    warnings: Sequence[str]  # of the runs themselves
