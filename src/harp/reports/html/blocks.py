"""What a report is made of, before it is a page, a text or data: sections of tables, figures, images and code."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from harp.experiments.records import Finding
from harp.reports import templating
from harp.reports.plots import Chart


@cache
def _all_words() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((templating.FOLDER / "report_words.yaml").read_text("utf-8"))
    return content


def words(kind: str, name: str, **values: object) -> tuple[str, str]:
    """Title and lead of a section, or title and caption of a figure, filled with values."""
    title, text = _all_words()[kind][name]
    return title.format(**values), text.format(**values)


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
class Verdicts(Block):
    """The checks of a network."""

    title: str
    findings: Sequence[Finding]

    @property
    def rows(self) -> list[dict[str, str]]:
        """Check, verdict, finding, and why the check is made if it is known by name."""
        return [
            {
                "check": one.check,
                "verdict": one.verdict,
                "text": one.text,
                "why": _all_words()["checks"].get(one.check, ""),
            }
            for one in self.findings
        ]


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


def figure(name: str, charts: Sequence[Chart], table: Table, **values: object) -> Figure:
    """A figure with the words of its name."""
    return Figure(*words("figures", name, **values), charts, table)


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


def section(anchor: str, blocks: Sequence[Block], **values: object) -> Section | None:
    """A chapter with the words of its anchor; None if it has no content."""
    return Section(anchor, *words("sections", anchor, **values), blocks) if blocks else None


@dataclass(frozen=True)
class Tile:
    """A number to see first."""

    title: str
    value: str
    before: str = ""
    text: str = ""
    bad: bool = False  # must not look like any other


@dataclass(frozen=True)
class Part:
    """What is said of one data set and model; the tiles are of the network that `shown` names."""

    anchor: str  # begins those of its sections; empty if it is alone
    title: str
    subtitle: str
    headline: str
    tiles: Sequence[Tile]
    notes: Sequence[str]
    sections: Sequence[Section]
    shown: str
    warnings: Sequence[str]  # of the runs themselves
    line: str  # what is shown first and its accuracies, in one line
    failed: bool  # whether that must not look like any other


@dataclass(frozen=True)
class Report:
    """The whole report."""

    title: str
    subtitle: str
    parts: Sequence[Part]
    foot: str
