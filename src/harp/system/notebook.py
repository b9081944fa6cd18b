"""What objects show of themselves in a notebook: a short table."""

from collections.abc import Sequence
from html import escape


def html_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", *, words: bool = False
) -> str:
    """A table as HTML: the first column is text at the left, the others are numbers at the right, or text (`words`)."""
    sides = ["left", *["left" if words else "right"] * (len(columns) - 1)]
    lines = [
        "".join(
            f'<{tag} style="text-align:{side};padding:2px 12px 2px 0">{escape(text)}</{tag}>'
            for side, text in zip(sides, row, strict=True)
        )
        for tag, row in [("th", columns), *(("td", row) for row in rows)]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<div><p><b>{escape(title)}</b></p><table>{body}</table>{below}</div>"
