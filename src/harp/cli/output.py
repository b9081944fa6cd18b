"""What several commands print: JSON, the verdicts of checks, and notes about slow steps."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harp.system.progress import Quiet

SLOW = 2.0
"""Seconds after which a slow step is announced."""

_MARKS = {"good": "✓", "look": "?", "bad": "✗"}


def echo(text: object, *, err: bool = False) -> None:
    """Print a line at once. (That of typer prints UTF-8 where the encoding is ASCII.)"""
    print(text, file=sys.stderr if err else sys.stdout, flush=True)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    echo(json.dumps(value, indent=2))


def show_table(display: "Quiet", title: str, columns: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> None:
    """Show records as a table: `columns` are the heads, each with the format of its cells."""
    rows = [[cell.format(**record) for cell in columns.values()] for record in records]
    display.table(title, list(columns), rows)


def show_findings(display: "Quiet", title: str, findings: Iterable[Mapping[str, str]]) -> None:
    """Show the findings of checks, each with a mark for its verdict."""
    rows = [[f"{_MARKS[finding['verdict']]} {finding['check']}", finding["text"]] for finding in findings]
    display.table(f"\n{title}", ("check", ""), rows)


@contextmanager
def note_if_slow(display: "Quiet", text: str) -> Iterator[None]:
    """Print a note if the block takes long; an empty text prints nothing."""
    timer = Timer(SLOW, display.note, [text])
    timer.daemon = True
    if text:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
