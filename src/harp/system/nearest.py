"""The message for a name that is not known: the nearest one that is, or all there are."""

import difflib
from collections.abc import Collection

_MOST_SHOWN = 24


def unknown(what: str, value: object, known: Collection[str], lister: str = "harp list") -> str:
    """The error message for an unknown name, with the nearest known one; `lister` is the command that shows all."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(value).lower(), names, n=1)
    rest = f"one of {', '.join(known) or 'none'}"
    rest = rest if len(known) <= _MOST_SHOWN else f"`{lister}` shows all {len(known)}"
    return f"unknown {what} {value!r}: " + (f"did you mean {names[close[0]]!r}?" if close else rest)
