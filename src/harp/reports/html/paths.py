"""Plain data without the folders of the machine that it was made on."""

import re
from typing import Any

_PICTURES = ("image", "attacked")  # keys of base64 text, which may look like a path
_PATH = re.compile(r"(?<![\w.:/\\])(?:file://|~|[A-Za-z]:)?[/\\][\w.@+\-]+(?:[/\\][\w.@+\-]+)+")
_WHOLE = re.compile(r"^(?:file://)?(?:~|[A-Za-z]:)?[/\\][^;]*[/\\][^;]*$")


def without_paths(value: Any) -> Any:
    """Plain data without the folders of a machine: of an absolute path its last part is left."""
    if isinstance(value, dict):
        return {key: item if key in _PICTURES else without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    pieces = [_last(piece) if _WHOLE.match(piece) else _PATH.sub(_name, piece) for piece in value.split(";")]
    return ";".join(pieces)


def _name(match: re.Match[str]) -> str:
    return _last(match[0])


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
