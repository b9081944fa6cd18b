"""What a report is made of, before it is a page, a text or data: sections of tables, figures, pictures and words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Table:
    """Rows of text under titles; the first column is text, the others are numbers unless `plain`."""

    form: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    plain: bool = False


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure."""

    svg: str
    title: str = ""


@dataclass(frozen=True)
class Key:
    """A line of a legend: a name and the number of its style."""

    name: str
    number: int
    joined: bool = True
    filled: bool = False


@dataclass(frozen=True)
class Figure:
    """Drawings side by side, what they mean, how to read them, and the numbers behind them."""

    form: ClassVar[str] = "figure"
    title: str
    caption: str
    panels: Sequence[Panel]
    table: Table
    legend: Sequence[Key] = ()
    small: bool = False  # many little drawings instead of a few large ones


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    form: ClassVar[str] = "words"
    text: str


@dataclass(frozen=True)
class Code:
    """Text as it stands in a file."""

    form: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Verdict:
    """A check, how it ended, what was found and why it is made."""

    check: str
    verdict: str
    text: str
    why: str = ""


@dataclass(frozen=True)
class Verdicts:
    """The checks of a network."""

    form: ClassVar[str] = "verdicts"
    title: str
    items: Sequence[Verdict]


@dataclass(frozen=True)
class Attacked:
    """An image, what was added to it, the sum, and what the network said before and after."""

    image: str  # data URIs
    change: str
    attacked: str
    label: str
    before: str
    after: str
    gain: str
    index: int


@dataclass(frozen=True)
class Gallery:
    """Attacked images."""

    form: ClassVar[str] = "gallery"
    title: str
    caption: str
    items: Sequence[Attacked]


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on demand."""

    form: ClassVar[str] = "fold"
    title: str
    blocks: Sequence["Block"]


def folded(blocks: Sequence["Figure | Verdicts | Gallery | Table"], what: str) -> list["Block"]:
    """The first block as it is; the others behind one fold, each behind its title."""
    others = [Fold(block.title, [block]) for block in blocks[1:]]
    return [*blocks[:1], *([Fold(f"{len(others)} more {what}", others)] if others else [])]


Block = Table | Figure | Words | Code | Verdicts | Gallery | Fold


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
    """All of it."""

    title: str
    subtitle: str
    headline: str
    tiles: Sequence[Tile]
    notes: Sequence[str]
    sections: Sequence[Section]
    foot: str = ""
    shown: str = field(default="")  # what the tiles are of
    warnings: Sequence[str] = ()  # what the runs themselves warn of
