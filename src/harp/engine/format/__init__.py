"""The `.harp` file format: a pruned network in few bytes, with a reader that needs numpy only.

`write` and `load` work with torch tensors. `reader.py` is stand-alone: copy it to use a network without this package.
docs/reference/format.md describes the format.
"""

from typing import TYPE_CHECKING, Any

from harp.engine.format.reader import BadFile, Stored, read, read_sparse

if TYPE_CHECKING:
    from harp.engine.format.torch_files import encode, load, write

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
    if name not in ("encode", "load", "write"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harp.engine.format import torch_files  # here, since reading a file does not need torch

    return getattr(torch_files, name)
