"""The `.harp` file: exact round trips, small sizes, and a reader that is safe with any file."""

import json
import math
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from harp.engine.format import BadFile, coding, encode, load, read, read_sparse, reader, write
from harp.errors import CheckpointError, RecipeError
from harp.pruning.masks import at_random
from support.paths import ROOT

Tensors = dict[str, Tensor]


def log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def masked(shape: tuple[int, ...], density: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random weight that is zero outside a random mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < density
    return torch.randn(shape, generator=generator).mul(0.05).masked_fill(~mask, 0), mask


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Equal in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@contextmanager
def at_most(size: int, what: str = "") -> Iterator[None]:
    """No more than so many bytes of memory are taken at any moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size, what
    finally:
        tracemalloc.stop()


def sealed(
    tensors: list[Any] | None, data: bytes = b"", *, text: bytes | None = None, packing: int = 0, version: int = 1
) -> bytes:
    """A file with any header and proper checksums of it."""
    header = text if text is not None else json.dumps({"tensors": tensors}).encode()
    start = reader.PRELUDE.pack(b"HARP", version, packing, len(header), 24 + len(header) + len(data), 0)[:-4]
    return start + zlib.crc32(header, zlib.crc32(start)).to_bytes(4, "little") + header + data


def entry(data: bytes, **changes: Any) -> dict[str, Any]:
    """An entry for a section that holds nothing but this."""
    plain: dict[str, Any] = {"name": "w", "shape": [4], "dtype": "float32", "coding": "plain"}
    return {**plain, "offset": 0, "length": len(data), "crc": zlib.crc32(data), **changes}


# --- Round trips


@st.composite
def networks(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """Tensors of any shape and type, some of them with masks."""
    tensors, masks = {}, {}
    for number in range(draw(st.integers(0, 3))):
        shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
        dtype = draw(
            st.sampled_from(["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"])
        )
        values = draw(arrays.arrays(dtype, shape))
        if draw(st.booleans()):
            mask = draw(arrays.arrays(bool, shape))
            values[~mask] = 0
            masks[f"t{number}"] = torch.from_numpy(mask)
        tensors[f"t{number}"] = torch.from_numpy(values)
    return tensors, masks


@given(networks(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_f32_values_are_read_back_exactly(network: tuple[Tensors, Tensors], deflate: bool) -> None:
    tensors, masks = network
    doubles = {name: value.dtype == torch.float64 for name, value in tensors.items()}
    tensors = {name: value.float() if doubles[name] else value for name, value in tensors.items()}
    header = {"architecture": {"description": "ümläut"}, "provenance": {"seed": 3}}
    content = encode(tensors, masks, header, "f32", deflate=deflate)
    header_read, dense = read(content)
    assert {key: header_read[key] for key in header} == header
    assert list(dense) == list(tensors)
    _, sparse = read_sparse(content)
    for name, tensor in tensors.items():
        assert same(dense[name], tensor.numpy())
        if name in masks:
            indices = sparse[name].indices
            assert indices is not None and np.array_equal(indices, np.flatnonzero(masks[name].numpy()))
            assert same(sparse[name].values, tensor.numpy().reshape(-1)[indices])
        else:
            assert sparse[name].indices is None


@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([(), (1,), (700,), (40, 30), (5, 1, 60, 3), (3, 0)]))
@settings(max_examples=60, deadline=None)
def test_rounded_values_are_near_and_stay_kept(seed: int, density: float, shape: tuple[int, ...]) -> None:
    weight, mask = masked(shape, density, seed)
    with_zero = weight.clone()
    kept = np.flatnonzero(mask.numpy())
    if len(kept):
        with_zero.view(-1)[int(kept[0])] = 0.0
    _, half = read(encode({"w": weight}, {"w": mask}, {}, "f16"))
    assert same(half["w"], weight.half().float().numpy())
    _, stored = read_sparse(encode({"w": with_zero}, {"w": mask}, {}, "int8"))
    indices, values = stored["w"].indices, stored["w"].values
    assert indices is not None and np.array_equal(indices, kept) and values.dtype == np.float32
    original = with_zero.numpy().reshape(-1)[kept]
    assert np.array_equal(np.sign(values), np.sign(original)), "what is kept and not zero stays so"
    rows = kept // max(math.prod(shape[1:]), 1)
    for row in np.unique(rows):
        here = original[rows == row]
        assert np.abs(values[rows == row] - here).max() <= np.abs(here).max() / 127 * 1.07


def test_special_numbers_survive_in_f32_and_f16() -> None:
    numbers = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e38, 0.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0]).bool()
    assert same(read(encode({"w": numbers}, {"w": mask}, {}, "f32"))[1]["w"], numbers.numpy())
    numbers[6] = 60000.0
    half = read(encode({"w": numbers}, {"w": mask}, {}, "f16"))[1]["w"]
    assert same(half, numbers.half().float().numpy())
    assert read_sparse(encode({"w": numbers}, {"w": mask}, {}, "f16"))[1]["w"].values.size == 7


def test_int8_stores_tiny_rows_and_rows_of_zeros() -> None:
    weight = torch.tensor([[1e-9, -2e-9, 0.0], [0.0, 0.0, 0.0], [1.0, 0.001, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]).bool()
    header, tensors = read(encode({"w": weight}, {"w": mask}, {}, "int8"))
    assert header["tensors"][0]["scale"] == "f32"
    assert np.allclose(tensors["w"][0], weight[0], rtol=0.01, atol=0)
    assert not tensors["w"][1].any()
    assert tensors["w"][2, 1] == pytest.approx(1 / 127, rel=1e-3), "the smallest step that is not zero"
    assert read_sparse(encode({"w": weight}, {"w": mask}, {}, "int8"))[1]["w"].values.size == 6


def test_views_other_types_and_tied_tensors_are_stored() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "turned": base.t(),
        "strided": base[::2, ::3],
        "huge stride": torch.arange(1_000_000.0)[::500_000],
        "brain": torch.tensor([1.5, -3.0], dtype=torch.bfloat16),
        "counter": torch.tensor(7),
        "again": base,
        "and again": base,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    _, tensors_read = read(encode(tensors, {}, {}))
    for name, tensor in tensors.items():
        expected = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
        assert same(tensors_read[name], expected.contiguous().numpy()), name


@pytest.mark.parametrize("others", ["f32", "f16"])
def test_tensors_without_a_mask_have_their_own_precision(others: str) -> None:
    bias = torch.randn(50, generator=torch.Generator().manual_seed(0))
    header, tensors_read = read(encode({"bias": bias}, {}, {}, "int8", others))
    assert header["tensors"][0]["coding"] == ("plain" if others == "f32" else "f16")
    assert same(tensors_read["bias"], (bias if others == "f32" else bias.half().float()).numpy())


def test_a_file_is_the_same_every_time_and_loads_into_torch(tmp_path: Path) -> None:
    weight, mask = masked((20, 30), 0.1)
    tensors = {"w": weight, "bias": torch.ones(20), "steps": torch.tensor(3)}
    for name in ("a.harp", "b.harp"):
        write(tmp_path / name, tensors, {"w": mask}, {"classes": 4}, values="f32")
    assert (tmp_path / "a.harp").read_bytes() == (tmp_path / "b.harp").read_bytes()
    header, tensors_read, masks = load(tmp_path / "a.harp")
    assert header["classes"] == 4 and masks.keys() == {"w"} and masks["w"].equal(mask)
    assert all(
        tensors_read[name].equal(tensor) and tensors_read[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
    assert same(read(str(tmp_path / "a.harp"))[1]["w"], read(tmp_path / "a.harp")[1]["w"])


@pytest.mark.parametrize("lanes", [1, 2, reader.FEW - 1, reader.FEW, reader.FEW + 1])
@pytest.mark.parametrize("odd", [0, 1, 777])
def test_coded_bytes_are_decoded_with_few_and_many_lanes(lanes: int, odd: int) -> None:
    count = lanes * reader.PER_LANE - odd
    data = np.random.default_rng(lanes).geometric(0.4, count).clip(0, 255).astype(np.uint8)
    content = coding.symbols(data)
    assert content[0] == 1 and len(content) < count / 2
    weight = torch.from_numpy(data)
    assert same(read(encode({"w": weight}, {}, {}))[1]["w"], data)


# --- Sizes


@pytest.mark.parametrize("density", [0.0005, 0.001, 0.003, 0.01, 0.03, 0.07, 0.1, 0.2, 0.3, 0.382, 0.42, 0.5])
def test_positions_are_near_the_entropy_bound(density: float) -> None:
    size = 1_500_000
    keep = np.random.default_rng(0).random(size) < density
    indices = np.flatnonzero(keep)
    assert 8 * len(coding.positions(indices)) <= 1.02 * log2_choose(size, len(indices))


@pytest.mark.parametrize(("size", "count"), [(960, 590), (2592, 105), (10_368, 126), (73_728, 737), (36_864, 37)])
def test_the_code_of_small_layers_has_little_overhead(size: int, count: int) -> None:
    indices = np.sort(np.random.default_rng(0).permutation(size)[:count])
    assert len(coding.positions(indices)) <= 1.03 * log2_choose(size, count) / 8 + 6


def test_clustered_masks_are_smaller_than_their_binomial_entropy() -> None:
    rng = np.random.default_rng(0)
    rates = np.where(rng.random(512) < 0.6, 0, 0.04)[:, None]
    keep = rng.random((512, 2304)) < rates  # dead output channels
    bits = 8 * len(coding.positions(np.flatnonzero(keep)))
    by_row = sum(log2_choose(2304, int(count)) for count in keep.sum(1))
    assert bits <= 0.9 * log2_choose(keep.size, int(keep.sum()))
    assert bits <= 1.04 * by_row, "near what is left when every row's count is known, and that is not free"
    blocks = np.kron(rng.random((512, 64)) < 0.02, np.ones(9)).astype(bool)  # whole kernels
    assert 8 * len(coding.positions(np.flatnonzero(blocks))) <= 0.35 * log2_choose(blocks.size, int(blocks.sum()))
    assert len(coding.positions(np.arange(100_000))) < 600, "a dense layer's mask is next to nothing"


def vgg16(counts: Callable[[list[int], int], list[int]], keep: float) -> tuple[Tensors, Tensors, int]:
    """A folded VGG16 with normal weights and biases and random masks, and its size in float32."""
    generator = torch.Generator().manual_seed(0)
    widths = [3, *[64] * 2, *[128] * 2, *[256] * 3, *[512] * 6]
    shapes: list[tuple[int, ...]] = [(after, before, 3, 3) for before, after in pairwise(widths)]
    shapes += [(256, 2048), (256, 256), (10, 256)]
    sizes = [math.prod(shape) for shape in shapes]
    tensors, masks = {}, {}
    for name, (shape, count) in enumerate(zip(shapes, counts(sizes, round(keep * sum(sizes))), strict=True)):
        masks[f"{name}.weight"] = at_random(torch.ones(shape, dtype=torch.bool), count, generator)
        weight = torch.zeros(shape)
        weight[masks[f"{name}.weight"]] = torch.randn(count, generator=generator) * math.sqrt(2 / math.prod(shape[1:]))
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    return tensors, masks, 4 * sum(tensor.numel() for tensor in tensors.values())


def uniform(sizes: list[int], total: int) -> list[int]:
    return [round(size * total / sum(sizes)) for size in sizes]


def equal(sizes: list[int], total: int) -> list[int]:
    return [min(size, total // len(sizes)) for size in sizes]


def test_vgg16_at_99_percent_is_125_times_smaller() -> None:
    tensors, masks, dense = vgg16(uniform, 0.01)
    content = encode(tensors, masks, {"architecture": {"name": "vgg16"}}, "f16")
    assert dense / len(content) >= 125
    assert dense / len(encode(tensors, masks, {}, "int8")) >= 170
    _, tensors_read = read(content)
    assert all(same(tensors_read[name], tensors[name].half().float().numpy()) for name in masks)


def test_vgg16_at_99_9_percent_with_equal_layers_is_1000_times_smaller() -> None:
    tensors, masks, dense = vgg16(equal, 0.001)
    assert dense / len(encode(tensors, masks, {"architecture": {"name": "vgg16"}}, "f16", "f16")) >= 1000


# --- What the writer refuses


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (({"w": torch.ones(3)}, {}, {}, "f8"), RecipeError),
        (({"w": torch.ones(3)}, {}, {}, "f16", "int8"), RecipeError),
        (({"w": torch.ones(3)}, {}, {"tensors": []}), RecipeError),
        (({"w": torch.ones(3)}, {"v": torch.ones(3).bool()}, {}), CheckpointError),
        (({"w": torch.ones(3)}, {"w": torch.ones(3)}, {}), CheckpointError),
        (({"w": torch.ones(3)}, {"w": torch.ones(4).bool()}, {}), CheckpointError),
        (({"w": torch.ones(3)}, {"w": torch.zeros(3).bool()}, {}), CheckpointError),
        (({"w": torch.tensor([1e6])}, {"w": torch.ones(1).bool()}, {}), CheckpointError),
        (({"w": torch.tensor([1e6])}, {}, {}, "f32", "f16"), CheckpointError),
        (({"w": torch.tensor([float("nan")])}, {"w": torch.ones(1).bool()}, {}, "int8"), CheckpointError),
        (({"w": torch.tensor([1e-45])}, {"w": torch.ones(1).bool()}, {}, "int8"), CheckpointError),
        (({"w": torch.ones(2, dtype=torch.complex64)}, {}, {}), CheckpointError),
        (({"w": torch.ones(2)}, {}, {"seed": {1, 2}}), CheckpointError),
        (({"w": torch.ones(2)}, {}, {"score": float("nan")}), CheckpointError),
        (({"w": torch.ones(2)}, {}, {"long": "x" * reader.LARGEST_HEADER}), CheckpointError),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error) as refused:
        encode(*arguments)
    assert "\n" not in str(refused.value)


# --- Untrusted files


def small() -> bytes:
    """A file with everything in it: both codes of positions, coded and plain bytes, scales, masks, a scalar."""
    weight, mask = masked((6, 100), 0.4)
    ones = torch.zeros(300)
    ones[::3] = 0.5
    tensors = {"w": weight, "v": weight[:2], "ones": ones, "bias": torch.ones(3), "steps": torch.tensor(3)}
    return encode(tensors, {"w": mask, "v": mask[:2], "ones": ones != 0}, {"classes": 2}, "int8", deflate=False)


def test_the_small_file_has_every_coding() -> None:
    content = small()
    header, _ = read(content)
    data = content[24 + struct.unpack_from("<I", content, 8)[0] :]
    first = {data[item["offset"]] for item in header["tensors"] if "index" in item}
    assert {code >= reader.BUCKETS for code in first} == {False, True}
    assert {item["coding"] for item in header["tensors"]} == {"plain", "int8"}


def test_a_file_cut_anywhere_is_refused() -> None:
    content = small()
    for length in range(len(content)):
        with pytest.raises(BadFile, match=r"no \.harp file|cut or damaged"):
            read(content[:length])
    with pytest.raises(BadFile, match="cut or damaged"):
        read(content + b"\0")


@pytest.mark.parametrize("deflate", [True, False])
def test_every_flipped_bit_is_detected(deflate: bool) -> None:
    weight, mask = masked((4, 20), 0.3)
    content = encode({"w": weight, "b": torch.ones(2)}, {"w": mask}, {"classes": 2}, "f16", deflate=deflate)
    for position in range(8 * len(content)):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(BadFile) as refused:
            read(bytes(changed))
        assert "\n" not in str(refused.value)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_refused(content: bytes) -> None:
    for candidate in (content, b"HARP" + content, sealed(None, text=content), sealed(None, text=content, packing=1)):
        with pytest.raises(BadFile):
            read(candidate)


@given(st.data(), st.sampled_from(["plain", "f16", "f32", "int8"]), st.sampled_from(reader.DTYPES))
@settings(max_examples=300, deadline=None)
def test_any_bytes_in_a_section_are_values_or_refused(data: st.DataObject, stored: str, dtype: str) -> None:
    """The checksums are right here: the decoder itself has to hold."""
    start = data.draw(st.sampled_from([b"", b"\0", b"\x41\1", b"\x40\0", b"\1\x90\0", b"\x41\1\x84\0\x8c\0"]))
    content = start + data.draw(st.binary(max_size=60))
    count, index = data.draw(st.integers(0, 12)), data.draw(st.integers(0, len(content)))
    sparse = {"nonzeros": count, "index": index, "scale": "f16"} if data.draw(st.booleans()) else {}
    shape = data.draw(st.sampled_from([[20], [2, 10], [20, 2**30], []])) if sparse else [count]
    try:
        _, stored_tensors = read_sparse(
            sealed([entry(content, shape=shape, coding=stored, dtype=dtype, **sparse)], content)
        )
    except BadFile as refused:
        assert "\n" not in str(refused)
        return
    tensor = stored_tensors["w"]
    assert tensor.values.dtype == dtype and len(tensor.values) == count
    if tensor.indices is not None:
        assert (np.diff(tensor.indices) > 0).all() and (
            (tensor.indices >= 0) & (tensor.indices < math.prod(shape))
        ).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**12]},
        {"shape": [2**40, 2**40]},
        {"shape": [0, 2**40, 2**40]},
        {"shape": [1] * 33},
        {"shape": [-4]},
        {"shape": [4.0]},
        {"shape": [True] * 4},
        {"shape": "4"},
        {"shape": None},
        {"shape": [10**4000]},
        {"shape": [10**4000] * 33},
        {"shape": [2] * 200_000},  # a product that takes minutes
        {"name": 3},
        {"dtype": "object"},
        {"dtype": ["float32"]},
        {"coding": "lz4"},
        {"coding": None},
        {"coding": "int8"},
        {"offset": 1},
        {"offset": -1},
        {"length": -1},
        {"length": 10**12},
        {"length": 3},
        {"crc": 0},
        {"nonzeros": 5, "index": 0},
        {"nonzeros": -1, "index": 0},
        {"nonzeros": 1, "index": 10**12},
        {"nonzeros": 1, "index": -1},
        {"nonzeros": 1},
        {"nonzeros": 1, "index": 0},
        {"nonzeros": 10**11, "shape": [10**12], "index": 5},
        {"nonzeros": 1, "index": 2, "coding": "int8"},
    ],
)
def test_false_headers_are_refused_before_memory_is_allocated(changes: Mapping[str, Any]) -> None:
    data = bytes([0, 0]) * 40
    content = sealed([entry(data, **changes)], data)
    with at_most((1 << 20) + 64 * len(content)), pytest.raises(BadFile) as refused:
        read(content)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_headers_with_too_many_values_are_refused_before_memory_is_allocated() -> None:
    """Below the limit, but without the bytes for it: Rice codes, buckets, plain and coded values."""
    count = 100_000_000
    sections = {
        "rice": (bytes([7]) + bytes(200), {"nonzeros": count, "index": 201}),
        "buckets": (bytes([65, 1, 0x90, 0]) + bytes(200), {"nonzeros": count, "index": 204}),
        "plain": (bytes(200), {}),
        "coded": (bytes([1, 0x90, 0]) + bytes(200), {}),
    }
    for name, (data, changes) in sections.items():
        content = sealed([entry(data, shape=[count], **changes)], data)
        with at_most(1 << 20, name), pytest.raises(BadFile):
            read(content)


def test_surplus_positions_are_refused_before_they_are_decoded() -> None:
    data = bytes([0]) + b"\xff" * 300_000 + ONE
    content = sealed([entry(data, shape=[3_000_000], nonzeros=1, index=300_001)], data)
    with at_most(12 * len(content)), pytest.raises(BadFile, match="1 positions expected, 2400000 found"):
        read(content)


ONE = coding.planes(np.array([1.5], np.float32))


def wrapping() -> bytes:
    """A gap of 2 ** 24 times 2 ** 40, which is nothing in 64 bits."""
    return bytes([40]) + bytes(1 << 21) + b"\1" + bytes(5)


@pytest.mark.parametrize(
    ("index", "values", "changes", "match"),
    [
        (None, coding.planes(np.zeros(0, np.float32)), {"shape": [0, 2**40, 2**40]}, "too large"),
        (None, ONE, {"shape": [1] * 33}, "too large"),
        (None, ONE + b"\0", {"shape": [1]}, "to spare"),
        (None, b"\0\0\1\2", {"shape": [3], "dtype": "bool"}, "beyond 1"),
        (None, b"\2" + ONE[1:], {"shape": [1]}, "unknown way"),
        (None, ONE, {"shape": [1], "coding": "int8", "scale": "f16"}, "no scales"),
        (b"\0\1", ONE, {"coding": "int8"}, "no scales"),
        (b"\0\1", ONE, {"shape": [0]}, "more values"),
        (b"\0\x10", ONE, {}, "outside"),
        (b"\x41\0\4\0", ONE, {}, "outside"),
        (b"\x41\0\1\0", ONE, {}, "outside"),
        (b"\x43\0\1", ONE, {}, "unknown way"),
        (b"\x40\0\xff" + bytes(40), ONE, {}, "outside"),
        (b"\x29\1" + bytes(6), ONE, {}, "outside"),
        (wrapping(), ONE, {}, "outside"),
        (b"\5\1", ONE, {}, "cut|found"),
    ],
)
def test_false_sections_are_refused_with_the_reason(
    index: bytes | None, values: bytes, changes: Mapping[str, Any], match: str
) -> None:
    data = (index or b"") + values
    sparse = {} if index is None else {"nonzeros": 1, "index": len(index)}
    with pytest.raises(BadFile, match=match):
        read_sparse(sealed([entry(data, **{**sparse, **changes})], data))


@pytest.mark.parametrize("lanes", [1, reader.FEW])
def test_coded_bytes_that_do_not_add_up_are_refused(lanes: int) -> None:
    numbers = np.array([0, 0, 0, 1] * (256 * lanes), np.uint8)
    content = coding.symbols(numbers)
    states, words = 5, 5 + 4 * lanes
    count = struct.unpack_from("<I", content, words)[0]
    fewer = content[:words] + struct.pack("<I", count - 1) + content[words + 4 : -2]
    more = content[:words] + struct.pack("<I", count + 1) + content[words + 4 :] + b"\0\0"
    other = content[:states] + bytes([content[states] ^ 1]) + content[states + 1 :]
    table = content[:2] + b"\1" + content[3:]  # a sum of 4097

    def decoded(data: bytes) -> Any:
        return read(sealed([entry(data, shape=[len(numbers)], dtype="uint8")], data))[1]["w"]

    assert same(decoded(content), numbers)
    for wrong in (fewer, more, other):
        with pytest.raises(BadFile, match="add up"):
            decoded(wrong)
    with pytest.raises(BadFile, match="frequencies"):
        decoded(table)


def test_one_weight_in_a_huge_tensor_is_read_only_sparsely_or_within_the_limit() -> None:
    index = coding.positions(np.array([2**39 + 5]))
    data = index + coding.planes(np.array([1.5], np.float32))
    content = sealed([entry(data, shape=[2**20, 2**20], nonzeros=1, index=len(index))], data)
    _, stored_tensors = read_sparse(content)
    assert stored_tensors["w"].indices is not None and stored_tensors["w"].indices.tolist() == [2**39 + 5]
    with at_most(1 << 20), pytest.raises(BadFile, match="limit"):
        read(content)
    dense = encode({"w": torch.ones(1000)}, {}, {})
    assert read(dense, limit=4000)[1]["w"].sum() == 1000
    for call in (read, read_sparse):
        with pytest.raises(BadFile, match="limit"):
            call(dense, limit=3999)


def test_the_size_of_an_inflated_header_is_limited() -> None:
    bomb = zlib.compress(b'{"tensors": [], "x": "' + b"x" * (1 << 24) + b'"}', 9)
    with at_most(4 * reader.LARGEST_HEADER), pytest.raises(BadFile):
        read(sealed(None, text=bomb, packing=1))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"HARP",
        sealed([], version=2),
        sealed([], packing=2),
        sealed([], b"x"),
        sealed(None),
        sealed(None, text=b"[]"),
        sealed(None, text=b"{}"),
        sealed(None, text=b'{"tensors": {}}'),
        sealed(None, text=b'{"tensors": [7]}'),
        sealed(None, text=b"\xff\xfe"),
        sealed(None, text=b"[" * 100_000),
        sealed(None, text=b'{"tensors": [' + b"9" * 5000 + b"]}"),
        sealed([entry(b"\0" * 20), entry(b"\0" * 20, offset=20)], b"\0" * 40),
        sealed([entry(b"\0" * 20), entry(b"\0" * 20, name="v", offset=0)], b"\0" * 20),
        sealed([entry(b"\0" * 20), entry(b"\0" * 20, name="v", offset=10)], b"\0" * 40),
        sealed([entry(b"\0" * 20), entry(b"\0" * 20, name="v", offset=21)], b"\0" * 41),
    ],
)
def test_inconsistent_files_are_refused(content: bytes, tmp_path: Path) -> None:
    for call in (read, read_sparse):
        with pytest.raises(BadFile) as refused:
            call(content)
        assert "\n" not in str(refused.value)
    (tmp_path / "bad.harp").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.harp"):
        load(tmp_path / "bad.harp")


def test_a_missing_file_is_refused_in_one_line_and_masks_count_for_the_limit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        load(tmp_path / "none.harp")
    weight, mask = masked((10, 10), 0.1)
    write(tmp_path / "w.harp", {"w": weight}, {"w": mask}, {})
    assert load(tmp_path / "w.harp", limit=500)[2]["w"].equal(mask)
    with pytest.raises(CheckpointError, match="limit"):
        load(tmp_path / "w.harp", limit=499)


# --- The reader alone


def test_the_reader_needs_nothing_but_numpy(tmp_path: Path) -> None:
    source = Path(reader.__file__)
    assert len(source.read_text("utf-8").splitlines()) <= 200
    shutil.copy(source, tmp_path / "standalone.py")
    weight, mask = masked((30, 40), 0.1)
    write(tmp_path / "w.harp", {"w": weight}, {"w": mask}, {}, values="f32")
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "harp", "scipy", "safetensors"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
sys.path.insert(0, {str(tmp_path)!r})
import standalone
header, tensors = standalone.read({str(tmp_path / "w.harp")!r})
print(float(tensors["w"].sum(dtype="float64")), int((tensors["w"] != 0).sum()), "torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(out[0]) == pytest.approx(float(weight.double().sum()), abs=1e-12)
    assert out[1:] == [str(int(mask.sum())), "False"]


# --- The page that describes it


def block(title: str) -> str:
    page = (ROOT / "docs" / "reference" / "format.md").read_text("utf-8")
    match = re.search(rf"<!-- {title} -->\n```\w*\n(.*?)```", page, re.DOTALL)
    assert match is not None
    return match[1]


def test_the_example_in_the_docs_is_what_is_written() -> None:
    lines = [line.split() for line in block("the file").splitlines()]
    content = bytes.fromhex("".join("".join(line[1:]) for line in lines))
    assert [int(line[0], 16) for line in lines] == list(range(0, len(content), 16))
    tensors = {
        "layer.weight": torch.tensor([[0, 0.5, 0, 0], [0, 0, -1.25, 0]]),
        "layer.bias": torch.tensor([0.5, -2.0]),
    }
    mask = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 0]]).bool()
    header = {"architecture": {"description": "one linear layer"}, "input_shape": [4], "classes": 2}
    assert encode(tensors, {"layer.weight": mask}, header, "f16", deflate=False) == content
    header_read, _ = read(content)
    assert header_read == json.loads(block("the header"))


def test_the_table_in_the_docs_names_every_byte() -> None:
    page = (ROOT / "docs" / "reference" / "format.md").read_text("utf-8")
    lines = [line.split()[1:] for line in block("the file").splitlines()]
    content = bytes.fromhex("".join("".join(line) for line in lines))
    at = 0
    for row in re.findall(r"^\| ([0-9a-f]{3}) \| (.*?) \|", page, re.MULTILINE):
        assert int(row[0], 16) == at
        if "…" in row[1]:
            at += struct.unpack_from("<I", content, 8)[0]
            continue
        stated = bytes.fromhex(row[1].replace("`", " "))
        assert content[at : at + len(stated)] == stated
        at += len(stated)
    assert at == len(content)


def test_the_stream_in_the_docs_is_what_is_written() -> None:
    assert coding.symbols(np.array([0, 0, 0, 1] * 6, np.uint8)) == bytes.fromhex("".join(block("the stream").split()))
