"""Tables for terminals of any width: words may be wrapped and bars left out, numbers and names never are."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harp.system.text import printable

_BARS = frozenset("█▏▎▍▌▋▊▉ #-")
_GAP = 2  # blanks between columns
_NARROWEST = 24  # the least width of a column of words


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column is text, columns without a name are words or bars, the others are numbers.

    Where there is no room, words are wrapped; then bars are left out; then every row becomes a block of lines, one for
    each column.
    """
    columns = [printable(column, console.encoding) for column in columns]
    rows = [[printable(cell, console.encoding) for cell in row] for row in rows]
    wide = [max([len(column), *(_width(row[index]) for row in rows)]) for index, column in enumerate(columns)]
    words = [index for index, column in enumerate(columns) if not column]
    bars = [
        index for index in words if all(set(row[index]) <= _BARS for row in rows) and any(row[index] for row in rows)
    ]
    shown = list(range(len(columns)))
    if _least(wide, words, bars, shown) > console.width:
        shown = [index for index in shown if index not in bars]
    if _least(wide, words, bars, shown) > console.width:
        _print_blocks(console, title, columns, rows, shown)
        return
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index in shown:
        fixed = index not in words or index in bars
        table.add_column(
            columns[index],
            justify="left" if index == 0 or not columns[index] else "right",
            no_wrap=fixed,
            min_width=wide[index] if fixed else None,
        )
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    console.print(table)


def _least(wide: Sequence[int], words: Sequence[int], bars: Sequence[int], shown: Sequence[int]) -> int:
    """The least width of a table of these columns."""
    sizes = [min(wide[i], _NARROWEST) if i in words and i not in bars else wide[i] for i in shown]
    return sum(sizes) + _GAP * (len(sizes) - 1)


def _width(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _print_blocks(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int]
) -> None:
    """Print every row as its name and lines of two columns."""
    if title:
        console.print(title, style="bold")
    names = max((len(columns[index]) for index in shown[1:]), default=0)
    for row in rows:
        console.print(row[0])
        for index in shown[1:]:
            if row[index]:
                console.print(f"  {columns[index]:<{names}}  {row[index]}" if columns[index] else f"  {row[index]}")
