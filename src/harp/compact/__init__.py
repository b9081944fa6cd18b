"""The compact file: a pruned network in few bytes, with a reader that needs numpy only.

`write` and `load` are for networks of torch. `reader.py` stands alone: it is the file to copy to where a network is
used without this package. The format is described in docs/format.md.
"""

from harp.compact.folding import fold
from harp.compact.loading import load
from harp.compact.reader import BadFile, Stored, read, read_sparse
from harp.compact.writer import encode, write

__all__ = ["BadFile", "Stored", "encode", "fold", "load", "read", "read_sparse", "write"]
