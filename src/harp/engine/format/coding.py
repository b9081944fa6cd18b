"""Compresses numbers: bit packing, Golomb-Rice codes and interleaved rANS.

Positions of kept weights are coded as gaps. Gaps of a random mask are geometric, for which Golomb-Rice codes (Golomb,
Run-length encodings, IEEE Trans. Inf. Theory 1966; Rice, 1979) need no table, but lose up to 0.12 bits a gap. Where
that is more than a table costs, gaps are put into buckets whose width grows with the gap, and the buckets are entropy
coded by their own frequencies: within 0.01 bits a gap, and less than the mask's binomial entropy if rows or blocks of
it are pruned entirely. The entropy coder is rANS (Duda, Asymmetric numeral systems, 2013) with one state for every 1024
symbols. The states are interleaved (Giesen, Interleaved entropy coders, 2014), so numpy decodes many symbols at a time.
"""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.engine.format.reader import BUCKETS, LOWEST, PER_LANE, SCALE_BITS

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]
_SCALE = 1 << SCALE_BITS


def positions(indices: _Ints) -> bytes:
    """Ascending positions, in the code that is smallest."""
    if len(indices) == 0:
        return b""
    gaps = np.diff(indices, prepend=-1) - 1
    splits = [_buckets(gaps, bits) for bits in range(3)]
    sizes = [_estimate(_counts(buckets)) + int(extra.sum()) / 8 for buckets, extra in splits]
    bits = int(np.argmin(sizes))
    buckets, extra = splits[bits]
    bucketed = bytes([BUCKETS + bits]) + symbols(buckets) + packed(gaps & ((1 << extra) - 1), extra)
    return min(_rice(gaps), bucketed, key=len)


def planes(values: npt.NDArray[Any]) -> bytes:
    """Numbers as byte planes: all lowest bytes, then all second bytes, and so on; each plane compressed if shorter."""
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1)
    rows = little.view(np.uint8).reshape(little.size, values.itemsize)
    return b"".join(symbols(np.ascontiguousarray(plane)) for plane in rows.T)


def symbols(data: _Bytes) -> bytes:
    """Bytes as they are, or entropy-coded if that is shorter."""
    plain = b"\0" + data.tobytes()
    counts = _counts(data)
    if _estimate(counts) >= len(data):
        return plain
    return min(plain, _coded(data, _frequencies(counts)), key=len)


def _counts(data: _Bytes) -> _Ints:
    return np.bincount(data, minlength=256)


def _estimate(counts: _Ints) -> float:
    """A low estimate of the bytes that symbols with these counts take, including their table."""
    present, total = counts[counts > 0], max(int(counts.sum()), 1)
    entropy = float((present * np.log2(total / present)).sum()) / 8
    return entropy + len(present) + 2 * (total / PER_LANE) + 4


def _rice(gaps: _Ints) -> bytes:
    sizes = [int((gaps >> bits).sum()) + len(gaps) * (bits + 1) for bits in range(int(gaps.max()).bit_length() + 1)]
    bits = int(np.argmin(sizes))
    ends = np.cumsum((gaps >> bits) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    low = packed(gaps & ((1 << bits) - 1), np.full(len(gaps), bits, np.int64))
    return bytes([bits]) + np.packbits(unary, bitorder="little").tobytes() + low


def _buckets(gaps: _Ints, bits: int) -> tuple[_Bytes, _Ints]:
    """Buckets by the highest bit of a gap and `bits` bits after it, and how many lower bits are left."""
    # The exponent of a float is the position of the highest bit; below 2 ** 53 the conversion is exact.
    highest = np.frexp(gaps.astype(np.float64))[1].astype(np.int64) - 1
    extra = np.maximum(highest - bits, 0)
    return ((extra << bits) + (gaps >> extra)).astype(np.uint8), extra


def packed(numbers: _Ints, lengths: _Ints) -> bytes:
    """Numbers packed into bits, `lengths` bits each, the lowest bit first."""
    starts = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    bits = (np.repeat(numbers, lengths) >> places) & 1
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def _frequencies(counts: _Ints) -> _Ints:
    """Counts scaled to a sum of 4096; a positive count stays positive."""
    share = counts / counts.sum() * _SCALE
    scaled = np.where(counts > 0, np.maximum(np.floor(share), 1), 0).astype(np.int64)
    while scaled.sum() != _SCALE:
        # Add or subtract one where it changes the length of the code least.
        up = scaled.sum() < _SCALE
        changed = scaled + (1 if up else -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = np.where((counts > 0) & (changed > 0), counts * np.log2(scaled / changed), np.inf)
        scaled[np.argmin(cost)] = changed[np.argmin(cost)]
    return scaled


def _coded(data: _Bytes, frequencies: _Ints) -> bytes:
    """Table, states, number of words and words, encoded from the end; the reader's `_symbols` decodes them."""
    lanes = -(-len(data) // PER_LANE)
    state = np.full(lanes, LOWEST, np.uint64)
    weight = frequencies.astype(np.uint64)
    below = np.cumsum(weight, dtype=np.uint64) - weight
    words = []
    for start in reversed(range(0, len(data), lanes)):
        symbol = data[start : start + lanes]
        now, share = state[: len(symbol)], weight[symbol]
        full = now >= share << np.uint64(32 - SCALE_BITS)
        words.append(now[full].astype("<u2").tobytes())
        now = np.where(full, now >> np.uint64(16), now)
        state[: len(symbol)] = (now // share << np.uint64(SCALE_BITS)) + now % share + below[symbol]
    stream = b"".join(reversed(words))
    return b"\1" + _table(frequencies) + state.astype("<u4").tobytes() + struct.pack("<I", len(stream) // 2) + stream


def _table(frequencies: _Ints) -> bytes:
    table = bytearray()
    zeros = 0
    for frequency in frequencies[: int(np.flatnonzero(frequencies)[-1]) + 1].tolist():
        if frequency == 0:
            zeros += 1
            continue
        table += bytes([0, zeros - 1]) if zeros else b""
        table += bytes([frequency]) if frequency < 128 else bytes([128 + (frequency >> 8), frequency & 255])
        zeros = 0
    return bytes(table)
