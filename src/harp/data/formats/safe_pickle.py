"""Pickles of plain containers and integer arrays, read without calling anything that they name.

A pickle is a program. The few functions that numpy's own pickles name get harmless stand-ins here, and a pickle that
names any other function is refused.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable

import numpy as np

from harp.data.formats.bounded import Array, Payload, first_line
from harp.errors import DataError


def unpickle(payload: Payload, expected: str) -> object:
    """What the pickle holds, with a `PickledArray` for every array; errors say it should have been `expected`."""
    name, data = payload
    try:
        for opcode, argument, _ in pickletools.genops(data):
            # The memo is a table that grows to the index it is given: one short opcode could ask for 64 GB.
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(data):
                raise DataError(f"memo index {argument}, expected at most {len(data):,}")
        # The scan also proved that all lengths in the pickle are real: loading allocates no more.
        return _RestrictedUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = first_line(error)[:200]
        raise DataError(f"{name}: {len(data):,} bytes, expected {expected} ({reason})") from error


def as_text(value: object) -> str:
    """Python 2 pickled its str as bytes: both are text here."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, str):
        return value
    raise pickle.UnpicklingError(f"{type(value).__name__} where a pickle of numpy has text")


class _Global:
    """What a pickle gets when it names a function of the allow-list: our stand-in, which can't be altered.

    No dataclass: up to Python 3.11.2 a frozen one with slots gets a `__setstate__` that replaces ours, and alters it.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a pickle tried to alter a function")


class _PickledType:
    """Stands for the numpy dtype of a pickled array: a code such as u1 and its byte order."""

    def __init__(self, code: object, *rest: object) -> None:
        self.code = as_text(code)
        self.order = "|"

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) > 1):
            raise pickle.UnpicklingError("an array type that numpy doesn't write")
        self.order = as_text(state[1])


class PickledArray:
    """Stands for a pickled numpy array: keeps the parts, and makes an array only when they fit together."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise pickle.UnpicklingError("an array state that numpy doesn't write")
        _, shape, kind, fortran, raw = state
        self.parts = (raw, kind, shape, "F" if fortran else "C")

    def array(self) -> Array:
        """Build the array, if it is one of integers and its bytes are as many as its shape says."""
        if len(self.parts) != 4:
            raise ValueError("an array without contents")
        raw, kind, shape, order = self.parts
        if not isinstance(raw, bytes | bytearray) or not isinstance(kind, _PickledType):
            raise ValueError("an array without bytes or type")
        if kind.code[-2:] not in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8") or kind.order not in "|<>=":
            raise ValueError(f"an array of {kind.code}, expected integers")
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError("an array without shape")
        dtype = np.dtype(kind.order + kind.code[-2:])
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(f"an array of shape {shape} in {len(raw):,} bytes")
        return np.frombuffer(raw, dtype).reshape(shape, order="F" if as_text(order) == "F" else "C")


def _encoded(text: object, encoding: object = "latin1") -> bytes:
    """How protocols 0 to 2 of python 3 write bytes."""
    if as_text(encoding) != "latin1":
        raise pickle.UnpicklingError("bytes in an encoding that pickle doesn't write")
    return as_text(text).encode("latin-1")


def _empty_bytes() -> bytes:
    """How protocols 0 to 2 of python 3 write no bytes; with an argument it would be a way to allocate."""
    return b""


_NEW_ARRAY = _Global(lambda *_: PickledArray())
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _NEW_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _NEW_ARRAY,
    ("numpy.core.numeric", "_frombuffer"): _Global(PickledArray),
    ("numpy._core.numeric", "_frombuffer"): _Global(PickledArray),
    ("numpy", "ndarray"): _NEW_ARRAY,
    ("numpy", "dtype"): _Global(_PickledType),
    ("_codecs", "encode"): _Global(_encoded),
    ("__builtin__", "bytes"): _Global(_empty_bytes),
    ("builtins", "bytes"): _Global(_empty_bytes),
}


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles plain containers and integer arrays; any other name in a pickle is refused, not imported."""

    def find_class(self, module: str, name: str) -> object:
        """Look a name up in the allow-list only."""
        if (module, name) not in _ALLOWED:
            raise DataError(f"the pickle asks for {module}.{name}, expected only arrays, lists, dicts and text")
        return _ALLOWED[module, name]
