"""The native code: where it is, and what its structures look like. native/engine.h is the other side of it."""

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
ISAS = "avx512", "avx2", "baseline"  # instruction sets that there may be kernels for
PRODUCT, MOVE, MAXPOOL, MAXPOOL_BACK, PACK, UNPACK, WEIGHTS, WINOGRAD, NARROW = range(9)
LINEAR, RELU, LEAKY, CLIP, CLAMP = range(5)
NO_MASK, WRITE_MASK, APPLY_MASK = range(3)
TOGETHER = 4  # groups of images that a thread computes side by side; engine.cpp has room for eight

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_BUILT = Path(__file__).with_name(f"_native{_SUFFIX}")


class Step(Structure):
    """One step of a program."""

    _fields_ = (
        ("op", c_int64),
        ("x", c_int64),
        ("y", c_int64),
        ("r", c_int64),
        ("rows", c_int64),
        ("block", c_int64),
        ("place", c_void_p),
        ("start", c_void_p),
        ("stop", c_void_p),
        ("goes_on", c_int64),
        ("tap", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("runs", c_int64),
        ("run", c_void_p),
        ("zeros", c_int64),
        ("zero", c_void_p),
        ("xplane", c_int64),
        ("yplane", c_int64),
        ("activation", c_int64),
        ("low", c_float),
        ("high", c_float),
        ("mask", c_int64),
        ("kept", c_int64),
        ("maskrow", c_int64),
        ("size", c_int64 * 14),
        ("joint", c_int64),
    )


class Program(Structure):
    """Steps, and the memory that they work in."""

    _fields_ = (
        ("steps", POINTER(Step)),
        ("count", c_int64),
        ("lanes", c_int64),
        ("arena", c_void_p),
        ("arena_size", c_int64),
        ("together", c_int64),
        ("scratch", c_void_p),
        ("scratch_size", c_int64),
        ("worth", c_int64),
        ("input", c_int64),
        ("more", c_int64),
        ("output", c_int64),
        ("kept", c_int64),
    )


class Kernels(Structure):
    """The steps as one instruction set computes them, and the widths that suit it."""

    _fields_ = (
        ("name", c_char_p),
        ("lanes", c_int64),
        ("word", c_int64),
        ("widest", c_int64 * 4),
        ("step", c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library, None if it was not built for this machine; HARP_NATIVE_LIBRARY names another file."""
    if os.environ.get("HARP_NATIVE") == "0":
        return None
    named = os.environ.get("HARP_NATIVE_LIBRARY")
    try:
        return _loaded(named or str(_BUILT))
    except (OSError, AttributeError) as error:
        if not named:
            return None
        said = str(error).removeprefix(f"{named}: ")
        raise RecipeError(
            f"HARP_NATIVE_LIBRARY={named}: {said}; name one that `python -m harp.sparse.build` of this version made"
        ) from error


def _loaded(file: str) -> ctypes.CDLL:
    code = ctypes.CDLL(file)
    for function in (code.harp_abi, code.harp_step_size, code.harp_program_size):
        function.restype = c_int64
    # A number that somebody forgot to raise does not tell of a field that has come or gone; sizes do.
    theirs = code.harp_abi(), code.harp_step_size(), code.harp_program_size()
    if theirs != (ABI, ctypes.sizeof(Step), ctypes.sizeof(Program)):
        raise OSError("it is of another version")
    code.harp_kernels.restype = POINTER(Kernels)
    code.harp_kernels.argtypes = [c_char_p]
    code.harp_run.restype = None
    outside = (c_void_p,) * 4
    code.harp_run.argtypes = [POINTER(Kernels), POINTER(Program), *outside, c_int64, c_int64]
    return code


@cache
def kernels() -> Kernels | None:
    """The kernels for this CPU; HARP_ISA asks for others, by their name. None if there are none."""
    code, said = library(), os.environ.get("HARP_ISA", "")
    if code is None:
        if said and os.environ.get("HARP_NATIVE") != "0":
            raise RecipeError(f"HARP_ISA={said}: there is no native code here; `python -m harp.sparse.build` makes it")
        return None
    found = code.harp_kernels(os.fsencode(said))
    if not found:
        why = "this CPU does not have it" if said in ISAS else "there is none of this name"
        able = [isa for isa in ISAS if code.harp_kernels(isa.encode())]
        raise RecipeError(f"HARP_ISA={said}: {why}; choose from {', '.join(able)}")
    fit: Kernels = found.contents
    return fit


def address(array: npt.NDArray[Any]) -> int:
    """Where an array is. Quicker than its `ctypes`, which counts where a network takes a tenth of a millisecond."""
    return int(array.__array_interface__["data"][0])


def run(
    program: Program,
    groups: int,
    threads: int,
    given: int,
    answers: int | None,
    kept: int | None,
    more: int | None = None,
) -> None:
    """Compute groups of images; what is read and written beside the arena are addresses, None for nothing."""
    code, fit = library(), kernels()
    assert code is not None and fit is not None
    code.harp_run(fit, program, given, more, answers, kept, groups, threads)
