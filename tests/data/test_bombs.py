"""Small files that ask for much memory or time: each is refused, and memory stays near the size of the file."""

import gzip
import io
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from harp.data.datasets import index
from harp.data.formats import tar
from harp.data.formats.bounded import Payload
from harp.data.formats.matlab import read_mat5, read_mat5_records
from harp.data.formats.safe_pickle import unpickle
from harp.data.formats.tar import TarIndex, read_archive
from harp.errors import CheckpointError, DataError
from harp.experiments import recipe
from harp.system.tensors import load_tensors

MOST = 64 << 20  # bytes that a reader may take for the files here, which have less than 2 MB


def peak(read: Callable[[], object], error: type[Exception], words: str) -> str:
    """`read` fails with `error` and `words`, and takes little memory; its message."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=words) as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < MOST
        return str(caught.value)
    finally:
        tracemalloc.stop()


def text(letters: int) -> bytes:
    return b"X" + struct.pack("<I", letters) + b"a" * letters


# A text of 200,000 letters, then 10,000 times codecs.encode(text, "latin1").
ENCODED = (
    b"\x80\x02c_codecs\nencode\nq\0"
    + text(200_000)
    + b"q\1"
    + text(6).replace(b"aaaaaa", b"latin1")
    + b"q\2]("
    + b"h\0h\1h\2\x86R" * 10_000
    + b"e."
)  # fmt: skip
# Each of 60 tuples holds the one before it twice, and the last one is a key: its hash takes 2 ** 60 steps.
KEY = b"\x80\x02}" + b"N" + b"q\0h\0\x86" * 60 + b"Ns."
# The same with lists that are filled after they were referred to, from the outermost to the innermost.
FILLED = b"\x80\x02" + b"".join(b"]r" + struct.pack("<I", n) for n in range(60))
FILLED += b"".join(b"j" + struct.pack("<I", n) + b"(" + (b"j" + struct.pack("<I", n + 1)) * 2 + b"e" for n in range(59))
FILLED += b"."


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (ENCODED, "times as large"),
        (KEY, "times as large"),
        (FILLED, "changes an object"),
        (b"\x80\x02Nq\0h\5.", "not there"),
        (b"\x80\x02(NNt0tNe.", "not there"),
        (b"\x80\x02N" + b"(1" * 50_000 + b"tt.", "not there"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "memo index"),
    ],
    ids=["encode", "key", "filled", "get", "mark", "marks", "memo"],
)
def test_a_pickle_that_grows_is_refused(data: bytes, words: str) -> None:
    peak(lambda: unpickle(Payload("bomb", data), "a batch"), DataError, words)


def test_a_pickle_may_share_what_it_likes_a_few_times() -> None:
    shared = ["label"] * 3
    value = {b"a": [shared] * 4, b"b": (shared, {"deep": [[[shared]]]})}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert unpickle(Payload("fine", pickle.dumps(value, protocol)), "a batch") is not None


def archived(data: bytes, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
    return path


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x02c__builtin__\nbytearray\nJ\x00\x94\x35\x77\x85R.", "bytearray"),
        (b"\x80\x04\x8c\x08builtins\x8c\x09bytearray\x93J\x00\x94\x35\x77\x85R.", "bytearray"),
        (b"\x80\x02ctorch\nFloatTensor\nJ\x00\x94\x35\x77\x85R.", "torch.FloatTensor"),
        (b"\x80\x02ctorch\nTensor\nJ\x00\x94\x35\x77\x85\x81.", "torch.Tensor"),
        (b"\x80\x02ctorch._utils\n_rebuild_qtensor\n)R.", "_rebuild_qtensor"),
        (ENCODED, "tensors and plain values"),
        (KEY, "tensors and plain values"),
    ],
    ids=["bytearray", "stack", "tensor", "new", "quantised", "encode", "key"],
)
@pytest.mark.parametrize("old", [False, True])
def test_a_checkpoint_that_grows_is_refused(data: bytes, words: str, old: bool, tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    if old:  # as torch before 1.6 wrote it: a magic number, a version, facts of the system, then the content
        start = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {})]
        path.write_bytes(b"".join(start) + data)
    else:
        archived(data, path)
    peak(lambda: load_tensors(path), CheckpointError, words)


@pytest.mark.parametrize("zipped", [False, True])
def test_checkpoints_of_every_plain_kind_are_still_read(zipped: bool, tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    layer.weight.note = "kept"  # type: ignore[attr-defined]  # a parameter with an attribute is written in a way of its own
    content = {
        "state_dict": {**layer.state_dict(keep_vars=True), "half": torch.ones(2, dtype=torch.bfloat16)},
        "options": {"sizes": torch.Size([1, 2]), "device": torch.device("cpu"), "type": torch.float16, "seen": {1, 2}},
        "bytes": b"abc",
        "optimizer": torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9).state_dict(),
    }
    torch.save(content, tmp_path / "fine.pt", _use_new_zipfile_serialization=zipped)
    tensors, _ = load_tensors(tmp_path / "fine.pt")
    assert set(tensors) == {"weight", "bias", "half"}
    assert torch.equal(tensors["weight"], layer.weight.detach())


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header with any 12 bytes as its size."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT)[:512])
    block[124:136] = size
    block[148:156] = b" " * 8
    block[148:155] = b"%06o\0" % sum(block)
    return bytes(block)


NEGATIVE = b"\xff" * 10 + b"\xfc\x00"  # -1024 in base 256


@pytest.mark.parametrize("kind", [b"0", b"S", b"L", b"x"], ids=["file", "sparse", "name", "pax"])
def test_a_negative_size_in_an_archive_ends(kind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    path.write_bytes(header("a.jpg", b"%011o\0" % 0) * 20 + header("b.jpg", NEGATIVE, kind) + bytes(1024))
    peak(lambda: list(TarIndex(path)), DataError, "damaged|negative")
    packed = tmp_path / "shard.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    peak(lambda: read_archive(packed, ["c"]), DataError, "archive|in all")


def test_a_long_name_in_a_packed_archive_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "LARGEST", 1 << 22)
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(header("long", b"%011o\0" % (1 << 30), b"L"))
        for _ in range(64):
            file.write(bytes(1 << 22))
    assert path.stat().st_size < 1 << 20
    peak(lambda: read_archive(path, ["c"]), DataError, "in all")


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<2I", kind, len(data)) + data + bytes(-len(data) % 8)


@pytest.mark.parametrize("flags", [9, 2], ids=["numbers", "structure"])
def test_many_sizes_in_a_mat_file_are_not_multiplied(flags: int) -> None:
    sizes = struct.pack("<i", 2**31 - 1) * 400_000
    parts = element(6, struct.pack("<2I", flags, 0)) + element(5, sizes) + element(1, b"X")
    matrix = struct.pack("<2I", 14, len(parts)) + parts
    packed = zlib.compress(matrix)
    start = b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    payload = Payload("bomb.mat", start + struct.pack("<2I", 15, len(packed)) + packed)
    peak(lambda: read_mat5(payload), DataError, "of at most 32")
    peak(lambda: read_mat5_records(payload, "X"), DataError, "of at most 32")


def test_an_index_with_a_huge_label_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shard = tmp_path / "train-000000.tar"
    shard.write_bytes(bytes(1024))
    entry = index.Entry("a.jpg", 0, 0, 10, 1)
    for label in (2**31 - 1, -1):
        found = index.indexed([shard], lambda: [entry])
        (path,) = tmp_path.glob(".harp-index-*.npz")
        with np.load(io.BytesIO(path.read_bytes())) as arrays:
            changed = {**arrays, "labels": np.array([label])}
        np.savez(path, **changed)
        again = index.indexed([shard], lambda: [entry])
        assert found.labels.tolist() == again.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)), "anchors"),
        (
            "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)),
            "anchors",
        ),
        ("a: &a [*a]\n", "anchors"),
        ("[" * 200_000, "nested"),
        ("{" * 200_000, "nested"),
        ("- " * 100_000, "nested"),
        ("a: 1\na: 2\n", "twice"),
        ("a: " + "9" * 100_000, "can't be read"),
    ],
    ids=["lists", "merges", "itself", "brackets", "braces", "dashes", "twice", "digits"],
)
def test_yaml_that_grows_is_refused_in_a_short_line(written: str, words: str) -> None:
    message = peak(lambda: recipe.read(written, "recipe.yaml"), recipe.RecipeError, words)
    assert len(message) < 600 and "\n" not in message


def test_a_large_recipe_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: 1\n" + "# " + "x" * (1 << 20))
    peak(lambda: recipe.read(path, "recipe.yaml"), recipe.RecipeError, "more than 262,144 bytes")


def test_repeated_keys_are_found_among_many() -> None:
    many = "".join(f"k{n}: 1\n" for n in range(3000))
    assert len(recipe.read(many, "recipe")) == 3000
    with pytest.raises(recipe.RecipeError, match="'k7' is there twice"):
        recipe.read(many + "k7: 2\n", "recipe")
