"""The `.harp` file format: a pruned network in few bytes, with a reader that needs numpy only.

`write` and `load` work with torch tensors. `reader.py` is stand-alone: copy it to use a network without this package.
docs/format.md describes the format.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harp.engine.format.reader import BadFile, Stored, read, read_sparse

if TYPE_CHECKING:
    from harp.engine.format.torch_reader import load
    from harp.engine.format.writer import encode, write

# These need torch, so they are imported when they are first used; reading a file does not need torch.
_HOMES = {"encode": "writer", "load": "torch_reader", "write": "writer"}

__all__ = [
    "BadFile",
    "Stored",
    "encode",
    "load",
    "read",
    "read_sparse",
    "reader",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
