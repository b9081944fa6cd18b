"""Reads `.harp` files: pruned networks, small. docs/reference/format.md describes the format, byte by byte.

This file needs Python 3.11 and numpy only: it can be copied to where networks are read. No file is trusted: sizes are
checked against the length of the file and against `limit` before memory is allocated. All errors are a `BadFile`.
"""

import io
import itertools
import json
import math
import pathlib
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

VERSION = 1
PRELUDE = struct.Struct("<4sHHIQI")  # magic, version, packing of the header, its length, the file's length, checksum
LARGEST_HEADER, LARGEST_TENSOR = 1 << 22, 1 << 40  # in bytes, in elements
SCALE_BITS, PER_LANE, LOWEST, FEW = 12, 1024, 1 << 16, 48  # of the entropy coder; Python is faster for few lanes
BUCKETS = 64  # codes of positions: below this a Rice parameter, from here on buckets
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
STORED = {"f16": "<f2", "f32": "<f4", "int8": "|i1"}
Array = npt.NDArray[Any]


class BadFile(ValueError):
    """The file is damaged, not of this format, or larger than allowed."""


class Stored(NamedTuple):
    """A tensor as it is stored: values at ascending indices in C order; without indices, all values."""

    shape: tuple[int, ...]
    indices: npt.NDArray[np.int64] | None
    values: Array

    def dense(self) -> Array:
        """All values in their shape, zero where nothing is stored."""
        full = np.zeros(math.prod(self.shape), self.values.dtype)
        full[slice(None) if self.indices is None else self.indices] = self.values
        return full.reshape(self.shape)


def read(source: str | pathlib.Path | bytes, limit: int = 1 << 31) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header, and every tensor in full; at most `limit` bytes of tensors."""
    header, stored = read_sparse(source, limit)
    need = sum(math.prod(tensor.shape) * tensor.values.itemsize for tensor in stored.values())
    _demand(need <= limit, f"the tensors take {need} bytes, more than the limit of {limit}")
    return header, {name: tensor.dense() for name, tensor in stored.items()}


def read_sparse(source: str | pathlib.Path | bytes, limit: int = 1 << 31) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The header, and every tensor as it is stored; at most `limit` bytes of indices and values."""
    content = source if isinstance(source, bytes) else pathlib.Path(source).read_bytes()
    _demand(len(content) >= PRELUDE.size and content[:4] == b"HARP", "this is no .harp file")
    _, version, packing, length, total, checksum = PRELUDE.unpack_from(content)
    known = f"this reader knows version {VERSION}, packing 0 and 1"
    _demand(version == VERSION and packing in (0, 1), f"the file is of version {version}, packing {packing}; {known}")
    _demand(total == len(content), f"the file has {len(content)} bytes instead of {total}: it is cut or damaged")
    packed, data = content[PRELUDE.size : PRELUDE.size + length], content[PRELUDE.size + length :]
    _demand(zlib.crc32(packed, zlib.crc32(content[: PRELUDE.size - 4])) == checksum, "the header is damaged")
    header = _header(packed, packing)
    parts, start, need = dict[str, bytes](), 0, 0
    for entry in header["tensors"]:
        _check(entry)
        name, end = entry["name"], start + entry["length"]
        _demand(name not in parts, f"two tensors are called {name!r}")
        _demand(entry["offset"] == start and end <= len(data), f"tensor {name!r} is not where it should be")
        parts[name] = data[start:end]
        _demand(zlib.crc32(parts[name]) == entry["crc"], f"tensor {name!r} is damaged")
        entry_bytes = np.dtype(entry["dtype"]).itemsize + 8 * ("nonzeros" in entry)
        start, need = end, need + entry_bytes * entry.get("nonzeros", math.prod(entry["shape"]))
    _demand(start == len(data), f"{len(data) - start} bytes belong to no tensor")
    _demand(need <= limit, f"the stored values take {need} bytes, more than the limit of {limit}")
    return header, {entry["name"]: _tensor(entry, parts[entry["name"]]) for entry in header["tensors"]}


def _header(packed: bytes, packing: int) -> dict[str, Any]:
    try:
        text = zlib.decompressobj().decompress(packed, LARGEST_HEADER + 1) if packing else packed
        header: dict[str, Any] = json.loads(text.decode("utf-8")) if len(text) <= LARGEST_HEADER else {}
    except (zlib.error, ValueError, RecursionError) as error:
        raise BadFile(f"the header is no JSON: {error}") from error
    _demand(isinstance(header, dict) and isinstance(header.get("tensors"), list), "the header lists no tensors")
    return header


def _check(entry: Any) -> None:
    """Refuse an entry of the header that makes no sense by itself."""
    named = isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("shape"), list)
    _demand(named, "a tensor has no name or no shape")
    name, shape, coding, sparse = entry["name"], entry["shape"], entry.get("coding"), "nonzeros" in entry
    numbers = [entry.get(key) for key in ("offset", "length", "crc", *(("nonzeros", "index") if sparse else ()))]
    _demand(all(type(n) is int and n >= 0 for n in [*shape, *numbers]), f"{name!r} has a size that is no number")
    places = math.prod(min(max(n, 1), LARGEST_TENSOR + 1) for n in shape[:32])  # numpy can't hold (0, 2**40, 2**40)
    _demand(places <= LARGEST_TENSOR and len(shape) <= 32, f"{name!r:.100} is too large: shape {shape[:33]!r:.200}")
    _demand(entry.get("dtype") in DTYPES and coding in ("plain", *STORED), f"{name!r} is stored in an unknown way")
    _demand(not sparse or numbers[3] <= math.prod(shape), f"{name!r} has more values than places")
    _demand(coding != "int8" or (sparse and entry.get("scale") in ("f16", "f32")), f"{name!r} has no scales")


@np.errstate(all="ignore")  # an untrusted file may hold any numbers
def _tensor(entry: dict[str, Any], content: bytes) -> Stored:
    part, shape, dtype = io.BytesIO(content), tuple(entry["shape"]), np.dtype(entry["dtype"])
    size, indices = math.prod(shape), None
    if "nonzeros" in entry:
        indices = _positions(io.BytesIO(_take(part, entry["index"])), entry["nonzeros"], size)
    values = _values(part, entry.get("nonzeros", size), STORED.get(entry["coding"]) or dtype.newbyteorder("<").str)
    if indices is not None and entry["coding"] == "int8":
        live, row = np.unique(indices // max(math.prod(shape[1:]), 1), return_inverse=True)
        values = values * _values(part, len(live), STORED[entry["scale"]]).astype(np.float32)[row]
    _demand(not part.read(1), f"tensor {entry['name']!r} has bytes to spare")
    _demand(values.dtype.kind != "b" or values.view("u1").max(initial=0) < 2, f"{entry['name']!r} has bools beyond 1")
    return Stored(shape, indices, values.astype(dtype))


def _positions(part: io.BytesIO, count: int, size: int) -> npt.NDArray[np.int64]:
    """Ascending positions from the gaps before them; a gap is a high part and a number of low bits."""
    code = _take(part, 1)[0] if count else 0
    if code < BUCKETS:  # Golomb-Rice: the high part in unary, as that many zeros and a one
        unary = _take(part, len(part.getvalue()) - part.tell() - (count * code + 7) // 8)
        marks = np.unpackbits(np.frombuffer(unary, np.uint8), bitorder="little")
        _demand((marked := np.count_nonzero(marks)) == count, f"{count} positions expected, {marked} found")
        high, lengths = np.diff(np.flatnonzero(marks), prepend=-1) - 1, np.full(count, code, np.int64)
    else:  # entropy-coded buckets: a number below 2 ** (bits + 1), or its highest bits and the number of lower bits
        bits, buckets = code - BUCKETS, _symbols(part, count).astype(np.int64)
        _demand(bits <= 2, f"positions are coded in an unknown way: {code}")
        high = np.where(buckets < 1 << bits, buckets, (buckets & ((1 << bits) - 1)) + (1 << bits))
        lengths = np.maximum((buckets >> bits) - 1, 0)
    largest = (high * 2.0**lengths).max(initial=0)  # in floats, as integers could overflow
    _demand(largest <= size and lengths.max(initial=0) <= 40, "a position is outside its tensor")
    low, starts = _take(part, (int(lengths.sum()) + 7) // 8), np.cumsum(lengths) - lengths
    windows = np.ndarray((len(low) + 1,), "<i8", low + bytes(8), 0, (1,))  # the eight bytes that start at each byte
    gaps = (high << lengths) | ((windows[starts >> 3] >> (starts & 7)) & ((1 << lengths) - 1))
    _demand(gaps.sum(dtype=np.float64) + count <= size and not part.read(1), "a position is outside its tensor")
    return np.cumsum(gaps + 1) - 1


def _values(part: io.BytesIO, count: int, dtype: str) -> Array:
    """Numbers from their byte planes: all lowest bytes, then all second bytes, and so on."""
    return np.stack([_symbols(part, count) for _ in range(np.dtype(dtype).itemsize)], 1).reshape(-1).view(dtype)


def _symbols(part: io.BytesIO, count: int) -> npt.NDArray[np.uint8]:
    """Bytes, stored as they are or entropy-coded by interleaved rANS."""
    method = _take(part, 1)[0]
    if method == 0:
        return np.frombuffer(_take(part, count), np.uint8)
    _demand(method == 1, f"bytes are coded in an unknown way: {method}")
    shares, lanes = _frequencies(part), -(-count // PER_LANE)
    state = np.frombuffer(_take(part, 4 * lanes), "<u4").astype(np.uint32)
    words = np.frombuffer(_take(part, 2 * int.from_bytes(_take(part, 4), "little")), "<u2").astype(np.uint32)
    symbol, below = np.repeat(np.arange(len(shares), dtype="u1"), shares), np.cumsum(shares, dtype="u4") - shares
    if lanes < FEW:
        table, frequencies, first, states = symbol.tobytes(), shares.tolist(), below.tolist(), state.tolist()
        decoded, source = bytearray(), iter(words.tolist())
        for lane in itertools.islice(itertools.cycle(range(lanes)), count):
            slot = (value := states[lane]) & 4095  # literals instead of SCALE_BITS and LOWEST: they are faster
            decoded.append(byte := table[slot])
            value = frequencies[byte] * (value >> 12) + slot - first[byte]
            states[lane] = value if value >= 65536 else (value << 16) | next(source, 0)
        _demand(next(source, None) is None and set(states) <= {LOWEST}, "coded bytes do not add up")
        return np.frombuffer(decoded, np.uint8)
    weight, offset = np.repeat(shares, shares), np.arange(len(symbol), dtype=np.uint32) - np.repeat(below, shares)
    decoded_bytes = np.empty(count, np.uint8)
    for start in range(0, count, lanes):
        state = state[: count - start]  # the last round may have fewer
        slot = state & ((1 << SCALE_BITS) - 1)
        decoded_bytes[start : start + lanes] = symbol[slot]
        state = weight[slot] * (state >> SCALE_BITS) + offset[slot]
        low = (state < LOWEST).nonzero()[0]
        _demand(len(low) <= len(words), "coded bytes do not add up")
        state[low], words = (state[low] << 16) | words[: len(low)], words[len(low) :]
    _demand(len(words) == 0 and (state == LOWEST).all(), "coded bytes do not add up")
    return decoded_bytes


def _frequencies(part: io.BytesIO) -> npt.NDArray[np.uint32]:
    """How many of 4096 bytes are 0, 1, ...: one byte each, two if its first bit is set, or 0 and a run of zeros."""
    shares: list[int] = []
    while sum(shares) < 1 << SCALE_BITS and len(shares) < 256:
        first = _take(part, 1)[0]
        second = 0 if 0 < first < 128 else _take(part, 1)[0]
        shares += [((first - 128) << 8) + second if first >= 128 else first] if first else [0] * (second + 1)
    _demand(sum(shares) == 1 << SCALE_BITS and len(shares) <= 256, "a tensor has no proper frequencies")
    return np.array(shares, np.uint32)


def _take(part: io.BytesIO, count: int) -> bytes:
    content = part.read(count)
    _demand(len(content) == count >= 0, f"a tensor is cut: {count} bytes expected, {len(content)} there")
    return content


def _demand(holds: object, otherwise: str) -> None:
    if not holds:
        raise BadFile(otherwise)
