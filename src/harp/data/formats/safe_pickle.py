"""Pickles of plain containers and integer arrays, read without calling anything that they name.

A pickle is a program. The few functions that numpy's own pickles name are replaced by harmless ones here, and a pickle
that names any other function is refused.
"""

import io
import math
import pickle
from collections.abc import Callable

import numpy as np

from harp.data.formats.bounded import Array, Payload, first_line
from harp.errors import DataError
from harp.system import pickle_scan


def unpickle(payload: Payload, expected: str) -> object:
    """The contents of a pickle, with a `PickledArray` for every array; an error says that it should be `expected`."""
    name, data = payload
    try:
        # The scan proves that all lengths in the pickle are real, and that no object in it is too large.
        pickle_scan.globals_of(data, len(data))
        return _RestrictedUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{name}: {len(data):,} bytes, expected {expected} ({first_line(error)})") from error


def as_text(value: object) -> str:
    """Text from str or bytes: Python 2 pickled its str as bytes."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, str):
        return value
    raise pickle.UnpicklingError(f"{type(value).__name__} where a pickle of numpy has text")


class _Function:
    """A function that a pickle may call, and can't alter.

    Not a dataclass: up to Python 3.11.2 a frozen one with slots gets a `__setstate__` that replaces ours.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a pickle tried to alter a function")


class _PickledType:
    """The numpy dtype of a pickled array: a code such as u1, and a byte order."""

    def __init__(self, code: object, *rest: object) -> None:
        self.code = as_text(code)
        self.order = "|"

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) > 1):
            raise pickle.UnpicklingError("an array type that numpy doesn't write")
        self.order = as_text(state[1])


class PickledArray:
    """The parts of a pickled numpy array; `array` builds it if they fit together."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise pickle.UnpicklingError("an array state that numpy doesn't write")
        _, shape, kind, fortran, raw = state
        self.parts = (raw, kind, shape, "F" if fortran else "C")

    def array(self) -> Array:
        """The array, if it has integers and as many bytes as its shape says; otherwise `ValueError`."""
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
    """Bytes, as protocols 0 to 2 of Python 3 write them."""
    if as_text(encoding) != "latin1":
        raise pickle.UnpicklingError("bytes in an encoding that pickle doesn't write")
    return as_text(text).encode("latin-1")


_NEW_ARRAY = _Function(lambda *_: PickledArray())
# How protocols 0 to 2 of Python 3 write empty bytes. It takes no argument: bytes(n) would allocate n bytes.
_EMPTY_BYTES = _Function(lambda: b"")
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _NEW_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _NEW_ARRAY,
    ("numpy.core.numeric", "_frombuffer"): _Function(PickledArray),
    ("numpy._core.numeric", "_frombuffer"): _Function(PickledArray),
    ("numpy", "ndarray"): _NEW_ARRAY,
    ("numpy", "dtype"): _Function(_PickledType),
    ("_codecs", "encode"): _Function(_encoded),
    ("__builtin__", "bytes"): _EMPTY_BYTES,
    ("builtins", "bytes"): _EMPTY_BYTES,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """Look a name up in the allow-list; nothing is imported."""
        if (module, name) not in _ALLOWED:
            raise DataError(f"the pickle asks for {module}.{name}, expected only arrays, lists, dicts and text")
        return _ALLOWED[module, name]
