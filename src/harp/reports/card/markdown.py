"""Markdown: a text of the user's, and a table."""

import re
from collections.abc import Sequence


def plain(text: object) -> str:
    """A text of the user's as a text in Markdown: one line, no markup, no cell border."""
    line = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", line).replace("<", "&lt;").replace(">", "&gt;")


def table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells under the names of their columns."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])
