"""Writes and reads `.harp` files with torch tensors and masks; `reader.py` reads them without torch."""

import json
import math
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harp.engine.format import coding
from harp.engine.format.reader import DTYPES, LARGEST_HEADER, LARGEST_TENSOR, PRELUDE, VERSION, BadFile, read_sparse
from harp.errors import CheckpointError, RecipeError
from harp.system.files import StrPath, reason, write_bytes

_Array = npt.NDArray[Any]
_FLOATS: dict[str, Any] = {"f16": np.float16, "f32": np.float32}
_STEPS = 127  # levels of an int8 on either side of zero


def write(
    path: StrPath,
    tensors: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    header: Mapping[str, Any],
    values: str = "f16",
    others: str = "f32",
) -> None:
    """Write a network's tensors atomically; of tensors with a mask, only the kept weights are stored.

    `values` is the type of kept weights: "f32" (exact), "f16", or "int8" with a scale for each output channel. `others`
    is that of floats without a mask: "f32" or "f16". Other types are stored as they are. Kept weights stay kept, even
    those that are zero; int8 rounds no nonzero weight to zero. `header` is any JSON object; docs/reference/format.md
    describes the keys that readers use.
    """
    write_bytes(path, encode(tensors, masks, header, values, others))


def load(path: StrPath, limit: int = 1 << 31) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """The header, the tensors and the masks of a file; at most `limit` bytes of tensors."""
    try:
        header, stored = read_sparse(Path(path), limit)
        sizes = {name: math.prod(tensor.shape) for name, tensor in stored.items()}
        need = sum(sizes[name] * (t.values.itemsize + (t.indices is not None)) for name, t in stored.items())
        if need > limit:
            raise BadFile(f"the tensors and masks take {need} bytes, more than the limit of {limit}")
    except (OSError, BadFile) as error:
        raise CheckpointError(f"can't read {path}: {error if isinstance(error, BadFile) else reason(error)}") from error
    tensors = {name: torch.from_numpy(tensor.dense()) for name, tensor in stored.items()}
    sparse = {name: tensor for name, tensor in stored.items() if tensor.indices is not None}
    flags = {name: tensor._replace(values=np.ones(len(tensor.values), np.bool_)) for name, tensor in sparse.items()}
    return header, tensors, {name: torch.from_numpy(mask.dense()) for name, mask in flags.items()}


def encode(
    tensors: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    header: Mapping[str, Any],
    values: str = "f16",
    others: str = "f32",
    *,
    precise: Collection[str] = (),
    deflate: bool = True,
) -> bytes:
    """The content of a file. Without `deflate` the header is not compressed.

    `precise` are the names of tensors whose kept entries are stored like floats without a mask, as in `others`.
    """
    if values not in (*_FLOATS, "int8"):
        raise RecipeError(f"values {values!r}: choose from 'f32', 'f16', 'int8'")
    if others not in _FLOATS:
        raise RecipeError(f"others {others!r}: choose from 'f32', 'f16'")
    if unknown := masks.keys() - tensors.keys():
        raise CheckpointError(f"there is a mask but no tensor called {min(unknown)!r}")
    if "tensors" in header:
        raise RecipeError("header: the name 'tensors' is reserved, choose another one")
    sections = [
        _section(name, tensor, masks.get(name), others if name in precise else values, others)
        for name, tensor in tensors.items()
    ]
    return _assemble(header, sections, deflate)


def _assemble(header: Mapping[str, Any], sections: list[tuple[dict[str, Any], bytes]], deflate: bool) -> bytes:
    """Prelude, header, sections."""
    entries, offset = [], 0
    for entry, content in sections:
        entries.append({**entry, "offset": offset, "length": len(content), "crc": zlib.crc32(content)})
        offset += len(content)
    full = {**header, "tensors": entries}
    try:
        text = json.dumps(full, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the header can't be written as JSON: {reason(error)}") from error
    if len(text) > LARGEST_HEADER:
        raise CheckpointError(f"the header has {len(text)} bytes, at most {LARGEST_HEADER} are allowed")
    packed = zlib.compress(text, 9) if deflate else text
    start = PRELUDE.pack(b"HARP", VERSION, deflate, len(packed), PRELUDE.size + len(packed) + offset, 0)[:-4]
    checksum = zlib.crc32(packed, zlib.crc32(start)).to_bytes(4, "little")
    return b"".join([start, checksum, packed, *(content for _, content in sections)])


def _section(name: str, tensor: Tensor, mask: Tensor | None, values: str, others: str) -> tuple[dict[str, Any], bytes]:
    """A tensor's entry in the header and its bytes."""
    array = _array(tensor)
    if array.dtype.name not in DTYPES or array.ndim > 32 or array.size > LARGEST_TENSOR:
        raise CheckpointError(f"{name!r} is a {array.dtype} of shape {array.shape}: it can't be stored")
    entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": array.dtype.name}
    if mask is None:
        coding_of, stored = _stored(name, array.reshape(-1), others)
        return {**entry, "coding": coding_of}, coding.planes(stored)
    indices = _indices(name, array, mask)
    index = coding.positions(indices)
    entry |= {"nonzeros": len(indices), "index": len(index)}
    kept = array.reshape(-1)[indices]
    if values == "int8" and array.dtype.kind == "f":
        scale_name, levels, scales = _quantised(name, kept, indices // max(math.prod(array.shape[1:]), 1))
        entry |= {"coding": "int8", "scale": scale_name}
        return entry, index + coding.planes(levels) + coding.planes(scales)
    coding_of, stored = _stored(name, kept, values)
    return {**entry, "coding": coding_of}, index + coding.planes(stored)


def _array(tensor: Tensor) -> _Array:
    plain = tensor.detach().cpu()
    return np.asarray((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())


def _indices(name: str, array: _Array, mask: Tensor) -> npt.NDArray[np.int64]:
    keep = mask.detach().cpu().numpy()
    if keep.dtype != np.bool_ or keep.shape != array.shape:
        raise CheckpointError(f"the mask of {name!r} is {keep.dtype} of shape {keep.shape}, not bool of {array.shape}")
    if strays := int(np.count_nonzero(array[~keep])):
        raise CheckpointError(f"{strays} weights of {name!r} are outside its mask and not zero: apply the mask first")
    return np.flatnonzero(keep)


def _stored(name: str, numbers: _Array, coding_of: str) -> tuple[str, _Array]:
    """Numbers converted to the type of a coding, or as they are ("plain") if that type is not smaller."""
    target = _FLOATS.get(coding_of)
    if numbers.dtype.kind != "f" or target is None or np.dtype(target).itemsize >= numbers.itemsize:
        return "plain", numbers
    with np.errstate(over="ignore"):
        stored = numbers.astype(target)
    lost = numbers[np.isfinite(numbers) & ~np.isfinite(stored)]
    if lost.size:
        raise CheckpointError(f"{name!r} holds {lost[0]:.6g}, too large for {coding_of}: store it in a wider type")
    return coding_of, stored


def _quantised(name: str, kept: _Array, rows: npt.NDArray[np.int64]) -> tuple[str, _Array, _Array]:
    """Symmetric quantisation by the largest weight of each row; no nonzero weight becomes zero."""
    if not np.isfinite(kept).all():
        raise CheckpointError(f"{name!r} holds NaN or infinite numbers, int8 can't")
    live, row = np.unique(rows, return_inverse=True)
    largest = np.zeros(len(live), np.float64)
    np.maximum.at(largest, row, np.abs(kept))
    with np.errstate(over="ignore"):
        wanted = largest / _STEPS
        half, single = wanted.astype(np.float16), wanted.astype(np.float32)
    smallest = np.finfo(np.float16).smallest_normal
    coarse = bool(((half >= smallest) | (largest == 0)).all() and np.isfinite(half).all())
    scale_name, scales = ("f16", half) if coarse else ("f32", single)
    if not np.isfinite(scales).all() or bool(((scales == 0) & (largest > 0)).any()):
        raise CheckpointError(f"{name!r} holds weights too large or too small for int8 with scales")
    steps = np.where(scales > 0, scales, 1).astype(np.float64)[row]
    levels = np.clip(np.rint(kept / steps), -_STEPS, _STEPS)
    levels = np.where((levels == 0) & (kept != 0), np.sign(kept), levels)
    return scale_name, levels.astype(np.int8), scales
