"""Tiny files in the published formats, and everything that can be wrong with them."""

import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harp.data.datasets.cifar import read_cifar_batch, read_cifar_binary
from harp.data.datasets.mnist import read_idx
from harp.data.formats.bounded import Payload
from harp.data.formats.matlab import read_mat5
from harp.data.formats.npz import read_npz
from harp.data.formats.tar import read_archive
from harp.data.registry import load
from harp.errors import DataError, MissingExtra
from support.data_files import IMAGES, LABELS, RNG, archive, binary, cifar, element, idx, mat5, matrix, npz, paint, svhn


def python2_batch() -> bytes:
    """The opcodes that cPickle of Python 2 wrote: byte strings, and numpy under its old module name."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = IMAGES.tobytes()
    dtype = (
        b"cnumpy\ndtype\n("
        + text(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    state = b"(K\x01K\x05M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"tR" + state
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in LABELS) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + labels + b"u."


READERS: dict[str, tuple[Callable[[Any], Any], bytes]] = {
    "idx": (read_idx, idx(IMAGES.reshape(5, 48, 64))),
    "idx.gz": (read_idx, gzip.compress(idx(IMAGES.reshape(5, 48, 64)))),
    "pickle": (read_cifar_batch, cifar()),
    "pickle-2": (read_cifar_batch, python2_batch()),
    "binary": (lambda file: read_cifar_binary(file, 1), binary()),
    "mat": (read_mat5, mat5([matrix("X", IMAGES, 9, 2, "<")])),
    "mat-compressed": (read_mat5, svhn(compress=True)[0]),
    "npz": (lambda file: read_npz(file, ["x"]), npz(x=IMAGES)),
}


# --- any reader


@pytest.mark.parametrize("kind", READERS)
def test_missing_file_and_folder(kind: str, tmp_path: Path) -> None:
    read, _ = READERS[kind]
    with pytest.raises(DataError, match=r"absent: no such file, expected"):
        read(tmp_path / "absent")
    with pytest.raises(DataError, match="not a regular file"):
        read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        read_idx(tmp_path / "pipe")


def test_too_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harp.data.formats.bounded.LARGEST", 10)
    (tmp_path / "f").write_bytes(bytes(11))
    with pytest.raises(DataError, match="11 bytes, expected an idx file"):
        read_idx(tmp_path / "f")


@pytest.mark.parametrize("kind", READERS)
def test_truncated_anywhere(kind: str, tmp_path: Path) -> None:
    read, data = READERS[kind]
    for length in {0, 1, 3, 4, 7, 9, 20, 127, 128, 130, 150, 200, len(data) // 2, len(data) - 1}:
        path = tmp_path / f"cut{length}"
        path.write_bytes(data[:length])
        if kind.startswith("mat") and length == 128:  # a file with no variables is well formed
            continue
        with pytest.raises(DataError, match=f"cut{length}") as caught:
            read(path)
        assert "\n" not in str(caught.value)
        assert "expected" in str(caught.value)


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4))
def test_damaged_bytes_raise_nothing_else(kind: str, seed: int, count: int) -> None:
    read, data = READERS[kind]
    random = np.random.default_rng(seed)
    damaged = bytearray(data)
    for position in random.integers(0, min(len(data), 400), count):
        damaged[position] = random.integers(256)
    try:
        read(Payload("damaged", bytes(damaged)))
    except DataError as error:
        assert "\n" not in str(error)


# --- idx


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 4, 5)])
def test_idx(compress: bool, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = RNG.integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "f").write_bytes(gzip.compress(idx(array)) if compress else idx(array))
    assert np.array_equal(read_idx(tmp_path / "f"), array)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0\x0d\x01\0\0\0\x01abcd", "00000d01, expected 000008"),
        (b"\0\0\x08\x09" + bytes(40), "expected 000008"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "expected at most"),
        (b"\0\0\x08\x01\0\0\0\x03ab", "10 bytes, expected 11"),
        (b"\0\0\x08\x01\0\0\0\x03abcd", "expected 11"),
    ],
)
def test_idx_wrong_header(data: bytes, message: str, compress: bool) -> None:
    with pytest.raises(DataError, match=message):
        read_idx(Payload("f", gzip.compress(data) if compress else data))


# --- CIFAR


@pytest.mark.parametrize("protocol", range(6))
def test_cifar_pickle(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(cifar(protocol))
    images, labels = read_cifar_batch(tmp_path / "data_batch_1")
    assert images.shape == (5, 3, 32, 32)
    assert np.array_equal(images.reshape(5, -1), IMAGES)
    assert labels.tolist() == LABELS


@pytest.mark.parametrize("protocol", range(6))
def test_cifar_array_in_column_order_and_array_labels(protocol: int) -> None:
    entries = {"data": np.asfortranarray(IMAGES), "fine_labels": np.array(LABELS, ">i4"), "labels": [0] * 5}
    batch = pickle.dumps(entries, protocol)
    images, labels = read_cifar_batch(Payload("train", batch))
    assert np.array_equal(images.reshape(5, -1), IMAGES)
    assert labels.tolist() == LABELS


def test_cifar_pickle_of_python_2() -> None:
    images, labels = read_cifar_batch(Payload("f", python2_batch()))
    assert np.array_equal(images.reshape(5, -1), IMAGES)
    assert labels.tolist() == LABELS


class Malicious:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_malicious_pickle_is_not_executed(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    batch = pickle.dumps({b"data": IMAGES, b"labels": Malicious(os.mkdir, (str(mark),))}, protocol)
    with pytest.raises(DataError, match=r"the pickle asks for \w+.mkdir"):
        read_cifar_batch(Payload("f", batch))
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x05numpy\x8c\x0bcore.memmap\x93.",  # dotted names inside an allowed module
        b"\x80\x02cnumpy\ndtype\nN}S'call'\nI1\ns\x86b.",  # alters our stand-in
        b"cbuiltins\nbytes\n(I99999999999\ntR.",  # allocates
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a byte array that is not there
        b"Nr\xfe\xff\xff\xff.",  # a memo of 64 GB
        b"p99999999999\n.",
        b"P1\n.",  # a persistent id
        b"\x82\x01.",  # an extension code
        pickle.dumps(3),
        pickle.dumps({b"labels": LABELS}),
        pickle.dumps({b"data": IMAGES}),
        pickle.dumps({b"data": IMAGES, b"labels": [1.5] * 5}),
        pickle.dumps({b"data": IMAGES, b"labels": LABELS[:4]}),
        pickle.dumps({b"data": IMAGES[:, :3000], b"labels": LABELS}),
        pickle.dumps({b"data": IMAGES.astype(np.int16), b"labels": LABELS}),
        pickle.dumps({b"data": np.array([object], dtype=object), b"labels": LABELS}, 2),
        pickle.dumps({b"data": IMAGES[:0], b"labels": []}),
    ],
)
def test_wrong_pickles(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^f: .*expected"):
        read_cifar_batch(Payload("f", data))
    images, _ = read_cifar_batch(Payload("f", cifar()))  # no stand-in was altered
    assert len(images) == 5


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_binary(label_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "f.bin").write_bytes(binary(label_bytes))
    images, labels = read_cifar_binary(tmp_path / "f.bin", label_bytes)
    assert np.array_equal(images.reshape(5, -1), IMAGES)
    assert labels.tolist() == LABELS


def test_cifar_binary_names_the_size() -> None:
    with pytest.raises(DataError, match=r"data_batch_3: 1,234 bytes, expected a multiple of 3,073 .30,730,000"):
        read_cifar_binary(Payload("data_batch_3", bytes(1234)), 1)


# --- archives


def test_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    archive(path, {"./d/one": b"1", "d/other": b"x" * 5000, "d/two": b"22"})
    members = read_archive(path, ["d/one", "d/two"])
    assert {name: payload.data for name, payload in members.items()} == {"d/one": b"1", "d/two": b"22"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.tar.gz"]
    with pytest.raises(DataError, match="no d/three in the archive"):
        read_archive(path, ["d/one", "d/three"])


def test_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    archive(path, {"d/one": RNG.bytes(5000)})
    data = path.read_bytes()
    for damaged in (b"", b"no archive", data[:40], data[:3000], data[:2000] + bytes(50) + data[2050:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a.tar.gz"):
            read_archive(path, ["d/one"])


def test_archive_member_that_claims_too_much(tmp_path: Path) -> None:
    info = tarfile.TarInfo("d/one")
    info.size = 1 << 40
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT)))
    with pytest.raises(DataError, match="expected"):
        read_archive(tmp_path / "a.tar.gz", ["d/one"])


# --- MATLAB


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_mat5(order: str, compress: bool, tmp_path: Path) -> None:
    data, x, y = svhn(order, compress)
    (tmp_path / "f.mat").write_bytes(data)
    variables = read_mat5(tmp_path / "f.mat")
    assert variables["X"].dtype == np.uint8
    assert np.array_equal(variables["X"], x)
    assert variables["y"].dtype == np.float64
    assert np.array_equal(variables["y"], y)


@pytest.mark.parametrize("order", ["<", ">"])
def test_mat5_wide_numbers_and_skipped_variables(order: str) -> None:
    numbers = np.array([[1.5, -2.0, 3e300]]).astype(f"{order}f8")
    text = matrix("t", np.zeros((1, 2), np.uint8), 4, 2, order)
    flags = element(6, struct.pack(f"{order}2I", 0x0806, 0), order)
    imaginary = element(14, flags + bytes(8), order)
    variables = read_mat5(Payload("f", mat5([text, imaginary, matrix("n", numbers, 6, 9, order)], order)))
    assert list(variables) == ["n"]
    assert np.array_equal(variables["n"], numbers)


def test_mat5_wrong() -> None:
    huge = matrix("X", np.zeros((1, 8), np.uint8), 9, 2, "<").replace(
        struct.pack("<2i", 1, 8), struct.pack("<2i", 2**30, 2**30)
    )
    bomb = zlib.compress(struct.pack("<2I", 14, 2**31) + bytes(100))
    for data, message in (
        (b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\x02IM" + bytes(400), "save it with -v7"),
        (b"\x89HDF\r\n\x1a\n" + bytes(400), "starts with 894844460d0a1a0a"),
        (mat5([huge]), "expected 1073741824x1073741824 values of 1"),
        (mat5([struct.pack("<2I", 14, 0xFFFFFFFF)]), "truncated, 0 bytes left, expected an element of 4,294,967,295"),
        (mat5([struct.pack("<2I", 15, len(bomb)) + bomb]), "expected a matrix that fits"),
        (mat5([struct.pack("<2I", 15, 8) + b"nonsense"]), "damaged compressed data"),
        (mat5([struct.pack("<I", 9 << 16 | 1) + bytes(20)]), "expected an element of 9"),
    ):
        with pytest.raises(DataError, match=message):
            read_mat5(Payload("f", data))


# --- npz


def test_npz() -> None:
    floats = np.asfortranarray(RNG.random((3, 4)))
    arrays = read_npz(Payload("f", npz(x=floats, y=np.arange(3), z=np.array(1))), ["x", "y"])
    assert np.array_equal(arrays["x"], floats)
    assert list(arrays) == ["x", "y"]


def test_npz_wrong() -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    claim = io.BytesIO()
    with zipfile.ZipFile(claim, "w") as file:
        file.writestr("x.npy", header.getvalue())
    for data, message in (
        (npz(y=np.zeros(1)), "no array x among y"),
        (npz(x=np.array([{}], dtype=object)), "expected numbers"),
        (npz(x=np.array(["text"])), "expected numbers"),
        (claim.getvalue(), "expected .1000000000000,. values of 8"),
        (b"PK nothing", "expected an .npz file"),
    ):
        with pytest.raises(DataError, match=message):
            read_npz(Payload("f", data), ["x"])


# --- folders of images


class ImageFolder(NamedTuple):
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]


def read_image_folder(root: Path, size: int) -> ImageFolder:
    """All images of a folder in memory."""
    folder = load("folder", root, size, stream=False)
    arrays = (tensor.numpy() for split in (folder.train, folder.test) for tensor in (split.images, split.labels))
    return ImageFolder(*arrays, folder.classes)


def test_image_folder(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    paint(tmp_path / "train/cat/1.png", 16, 8)
    paint(tmp_path / "train/cat/images/2.PNG", 4, 4, (200, 100, 0))
    exact = RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    (tmp_path / "train/ape").mkdir()
    pillow.fromarray(exact).save(tmp_path / "train/ape/1.png")
    (tmp_path / "train/ape/notes.txt").write_text("not an image")
    (tmp_path / "train/.hidden").mkdir()
    (tmp_path / "val/cat").mkdir(parents=True)
    pillow.new("L", (5, 9), 7).save(tmp_path / "val/cat/grey.jpg")
    folder = read_image_folder(tmp_path, 4)
    assert folder.classes == ("ape", "cat")
    assert folder.train_labels.tolist() == [0, 1, 1]
    assert folder.train_images.shape == (3, 3, 4, 4)
    assert np.array_equal(folder.train_images[0], exact.transpose(2, 0, 1))
    assert folder.train_images[1, :, 0, 0].tolist() == [10, 20, 30]
    assert folder.test_labels.tolist() == [1]
    assert np.all(folder.test_images == 7)


def test_image_folder_keeps_the_centre(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.zeros((4, 12, 3), np.uint8)
    pixels[:, 4:8] = 255
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        pillow.fromarray(pixels).save(tmp_path / part / "a/1.png")
    assert np.all(read_image_folder(tmp_path, 2).train_images == 255)


def test_image_folder_of_tiny_imagenet(tmp_path: Path) -> None:
    paint(tmp_path / "train/n01/images/n01_0.png", 4, 4)
    paint(tmp_path / "train/n02/images/n02_0.png", 4, 4)
    paint(tmp_path / "val/images/val_0.png", 4, 4)
    paint(tmp_path / "test/images/test_0.png", 4, 4)  # published without labels
    (tmp_path / "val/val_annotations.txt").write_text("val_0.png\tn02\t0\t0\t62\t62\n")
    folder = read_image_folder(tmp_path, 4)
    assert folder.test_labels.tolist() == [1]
    (tmp_path / "val/val_annotations.txt").write_text("../../secret.png\tn02\n")
    with pytest.raises(DataError, match="line 1"):
        read_image_folder(tmp_path, 4)


def test_image_folder_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="expected the folders train and test"):
        read_image_folder(tmp_path, 4)
    (tmp_path / "train").mkdir()
    paint(tmp_path / "test/a/1.png", 4, 4)
    with pytest.raises(DataError, match="each with one folder a class"):
        read_image_folder(tmp_path, 4)
    (tmp_path / "train/b").mkdir()
    with pytest.raises(DataError, match="b: no images"):
        read_image_folder(tmp_path, 4)
    paint(tmp_path / "train/b/1.png", 40, 40)
    with pytest.raises(DataError, match="class a is not in train"):
        read_image_folder(tmp_path, 4)
    paint(tmp_path / "train/a/1.png", 4, 4)
    with pytest.raises(DataError, match="image size 0"):
        read_image_folder(tmp_path, 0)
    whole = (tmp_path / "train/b/1.png").read_bytes()
    for damaged in (b"", b"no image", whole[:60], whole[: len(whole) - 30]):
        (tmp_path / "train/b/1.png").write_bytes(damaged)
        with pytest.raises(DataError, match=r"train.b.1.png: can't be decoded"):
            read_image_folder(tmp_path, 4)
    (tmp_path / "train/b/1.png").write_bytes(whole)
    monkeypatch.setattr(sys.modules["PIL.Image"], "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=r"1.png: can't be decoded \(Image size"):
        read_image_folder(tmp_path, 4)


def test_image_folder_larger_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        paint(tmp_path / part / "a/1.png", 4, 4)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    with pytest.raises(DataError, match=r"2 images at size 4096 need 0.1 GB"):
        read_image_folder(tmp_path, 4096)


def test_image_folder_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        paint(tmp_path / part / "a/1.png", 4, 4)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r'pip install "harp-prune\[images\]"'):
        read_image_folder(tmp_path, 4)
