"""The compact file: a pruned network in few bytes, with a reader that needs numpy only.

`write` and `load` are for networks of torch. `reader.py` stands alone: it is the file to copy to where a network is
used without this package. The format is described in docs/format.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harp.compact.reader import BadFile, Stored, read, read_sparse

if TYPE_CHECKING:
    from harp.compact.loading import load
    from harp.compact.writer import encode, write

# What needs torch is loaded when it is first used: reading does not.
_HOMES = {"encode": "writer", "load": "loading", "write": "writer"}

__all__ = ["BadFile", "Stored", "encode", "load", "read", "read_sparse", "write"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
