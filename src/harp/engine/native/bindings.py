"""Loads the native library and declares its structures, as in native/engine.h."""

import ctypes
import os
import sys
from ctypes import POINTER, Structure, c_char_p, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from harp.errors import RecipeError

ABI = 8
ISAS = "avx512", "avx2", "baseline"  # instruction sets with kernels of their own
PRODUCT, MOVE, MAXPOOL, MAXPOOL_BACK, PACK, UNPACK, WEIGHTS, WINOGRAD, NARROW = range(9)
LINEAR, RELU, LEAKY, CLIP, CLAMP = range(5)
NO_MASK, WRITE_MASK, APPLY_MASK = range(3)
TOGETHER = 4  # groups of images that a thread computes together; engine.cpp has room for eight

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_BUILT = Path(__file__).with_name(f"_native{_SUFFIX}")


def _fields(*lines: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields of a structure from lines of a type and the names of that type."""
    return [(name, kind) for kind, names in lines for name in names.split()]


class Step(Structure):
    """One step of a program."""

    _fields_ = _fields(
        (c_int64, "op x y r rows block"),
        (c_void_p, "place start stop"),
        (c_int64, "goes_on"),
        (c_void_p, "tap weight bias"),
        (c_int64, "runs"),
        (c_void_p, "run"),
        (c_int64, "zeros"),
        (c_void_p, "zero"),
        (c_int64, "xplane yplane activation"),
        (c_float, "low high"),
        (c_int64, "mask kept maskrow"),
        (c_int64 * 14, "size"),
        (c_int64, "joint"),
    )


class Program(Structure):
    """Steps, and the memory that they use."""

    _fields_ = _fields(
        (POINTER(Step), "steps"),
        (c_int64, "count lanes"),
        (c_void_p, "arena"),
        (c_int64, "arena_size together"),
        (c_void_p, "scratch"),
        (c_int64, "scratch_size worth input more output kept"),
    )


class Kernels(Structure):
    """The kernels of one instruction set, and its widths."""

    _fields_ = _fields((c_char_p, "name"), (c_int64, "lanes word"), (c_int64 * 4, "widest"), (c_void_p, "step"))


@cache
def library() -> ctypes.CDLL | None:
    """The library, None if it was not built for this machine; HARP_NATIVE_LIBRARY selects another file."""
    if os.environ.get("HARP_NATIVE") == "0":
        return None
    chosen = os.environ.get("HARP_NATIVE_LIBRARY")
    try:
        return _loaded(chosen or str(_BUILT))
    except (OSError, AttributeError) as error:
        if not chosen:
            return None
        message = str(error).removeprefix(f"{chosen}: ")
        raise RecipeError(
            f"HARP_NATIVE_LIBRARY={chosen}: {message}; name one that `python -m harp.engine.native.build` made"
        ) from error


def _loaded(file: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(file)
    for function in (loaded.harp_abi, loaded.harp_step_size, loaded.harp_program_size):
        function.restype = c_int64
    # The sizes detect a changed structure even if the version number was not raised.
    versions = loaded.harp_abi(), loaded.harp_step_size(), loaded.harp_program_size()
    if versions != (ABI, ctypes.sizeof(Step), ctypes.sizeof(Program)):
        raise OSError("it is of another version")
    loaded.harp_kernels.restype = POINTER(Kernels)
    loaded.harp_kernels.argtypes = [c_char_p]
    loaded.harp_run.restype = None
    outside = (c_void_p,) * 4
    loaded.harp_run.argtypes = [POINTER(Kernels), POINTER(Program), *outside, c_int64, c_int64]
    return loaded


@cache
def kernels() -> Kernels | None:
    """The best kernels for this CPU, or those that HARP_ISA names; None without native code."""
    code, name = library(), os.environ.get("HARP_ISA", "")
    if code is None:
        if name and os.environ.get("HARP_NATIVE") != "0":
            raise RecipeError(
                f"HARP_ISA={name}: there is no native code here; `python -m harp.engine.native.build` makes it"
            )
        return None
    pointer = code.harp_kernels(os.fsencode(name))
    if not pointer:
        problem = "this CPU does not have it" if name in ISAS else "there is none of this name"
        available = [isa for isa in ISAS if code.harp_kernels(isa.encode())]
        raise RecipeError(f"HARP_ISA={name}: {problem}; choose from {', '.join(available)}")
    chosen: Kernels = pointer.contents
    return chosen


def address(array: npt.NDArray[Any]) -> int:
    """The address of an array. Faster than `array.ctypes`, which matters for networks that take 0.1 milliseconds."""
    return int(array.__array_interface__["data"][0])


def run(
    program: Program,
    groups: int,
    threads: int,
    inputs: npt.NDArray[Any],
    outputs: npt.NDArray[Any],
    kept: npt.NDArray[Any],
    more: npt.NDArray[Any] | None = None,
) -> None:
    """Run a program for groups of images; `more` is a second input."""
    code, chosen = library(), kernels()
    assert code is not None and chosen is not None
    second = None if more is None else address(more)
    code.harp_run(chosen, program, address(inputs), second, address(outputs), address(kept), groups, threads)
