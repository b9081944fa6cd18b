"""Printing where an encoding lacks a character: a stand-in of ASCII takes its place."""

import codecs
import sys

_NAME = "harp-stand-in"

# One character for one where tables and bars are drawn, so that their columns stay in line.
STAND_INS = {
    **dict.fromkeys("█▉▊▋▌▍", "#"),
    **dict.fromkeys("▎▏", "-"),
    **dict.fromkeys("–—−─━╸╺", "-"),
    **dict.fromkeys("│┃", "|"),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("“”", '"'),
    **dict.fromkeys("\u00a0\u202f\u2009", " "),
    **dict.fromkeys("·•", "*"),
    "✓": "+",
    "✗": "x",
    "×": "x",
    "→": "->",
    "←": "<-",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "∞": "inf",
    "…": "...",
    "²": "2",
    "₂": "2",
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "ε": "epsilon",
    "λ": "lambda",
    "σ": "sigma",
    "µ": "u",
    "μ": "u",
}
"""What stands for a character where there is none of it; all else becomes an escape, as in Python's own messages."""


def never_fail_to_print() -> None:
    """Make standard output and standard error replace what their encoding lacks."""
    codecs.register_error(_NAME, _stand_in)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # only real streams have an encoding
        if reconfigure is not None:
            reconfigure(errors=_NAME)


def printable(text: str, encoding: str | None) -> str:
    """The text as it will be printed, for layouts that count characters."""
    codecs.register_error(_NAME, _stand_in)
    encoding = encoding or "utf-8"
    return text.encode(encoding, _NAME).decode(encoding)


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(STAND_INS.get(letter, letter.encode("ascii", "backslashreplace").decode()) for letter in letters), (
        error.end
    )
