"""The report as Markdown: the same words and tables, without the drawings."""

import re
from collections.abc import Sequence

from harp.reports.html.blocks import Block, Code, Figure, Fold, Gallery, Report, Section, Table, Verdicts, Words

_SIGNS = {"good": "✓ good", "look": "! look", "bad": "✗ bad"}


def render(report: Report) -> str:
    """The text."""
    lines = [f"# {_plain(report.title)}", "", _plain(report.subtitle), "", f"**{_plain(report.headline)}**", ""]
    for warning in report.warnings:
        lines += [f"> **Warning:** {_plain(warning)}", ""]
    if report.shown:
        lines += [f"Shown first: {_plain(report.shown)}.", ""]
    for note in report.notes:
        lines.append(f"- ⚠ {_plain(note)}")
    lines += [""] if report.notes else []
    for section in report.sections:
        lines += _section(section)
    return "\n".join([*lines, _plain(report.foot), ""])


def _section(section: Section) -> list[str]:
    lines = [f"## {_plain(section.title)}", "", _plain(section.lead), ""]
    for block in section.blocks:
        lines += _block(block)
    return lines


def _block(block: Block) -> list[str]:
    match block:
        case Table():
            return _table(block)
        case Figure():
            return [f"### {_plain(block.title)}", "", _plain(block.caption), "", *_table(block.table)]
        case Words():
            return [_plain(block.text), ""]
        case Code():
            return _code(block.text)
        case Verdicts():
            rows = [[_SIGNS[one.verdict], one.check, one.text, one.why] for one in block.items]
            return _table(Table(["", "check", "found", "why it is checked"], rows, block.title, plain=True))
        case Gallery():
            rows = [[str(one.index), one.label, one.before, one.after] for one in block.items]
            return _table(Table(["image", "truth", "before", "after"], rows, block.title, plain=True))
        case Fold():
            inner = [line for one in block.blocks for line in _block(one)]
            titled = isinstance(block.blocks[0], (Figure, Verdicts, Gallery))  # these say it themselves
            return inner if titled else [f"### {_plain(block.title)}", "", *inner]


def _code(text: str) -> list[str]:
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return [f"{fence}yaml", text.rstrip("\n"), fence, ""]


def _table(table: Table) -> list[str]:
    lines = [f"### {_plain(table.title)}", ""] if table.title else []
    right = "---" if table.plain else "---:"
    lines += [_line(table.columns), "|---|" + f"{right}|" * (len(table.columns) - 1)]
    lines += [_line(row) for row in table.rows]
    return [*lines, "", *([_plain(table.note), ""] if table.note else [])]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: on one line, without tags or links of its own."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", line)
