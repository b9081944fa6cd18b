"""Loading data sets by name, their checks, and hold-out splits."""

import gzip
import hashlib
import logging
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harp.data.batches import Batches
from harp.data.datasets.base import Facts
from harp.data.datasets.cifar import CIFAR10
from harp.data.registry import DATASETS, DataSet, Split, facts, holdout, load
from harp.errors import DataError
from support import data_files as files
from support.splits import numbered, numbers, quick

# --- data sets of the package


@pytest.mark.parametrize(
    ("name", "train", "test", "shape", "flip"),
    [("fashion", 5000, 1000, (1, 28, 28), True), ("digits", 1297, 500, (1, 8, 8), False)],
)
def test_embedded(name: str, train: int, test: int, shape: tuple[int, ...], flip: bool) -> None:
    data_set = load(name)
    assert (len(data_set.train), len(data_set.test), data_set.shape) == (train, test, shape)
    assert data_set.num_classes == len(data_set.classes) == 10
    assert replace(facts(name), hub=None) == Facts(train, test, shape, 10)  # type: ignore[type-var, arg-type]
    assert data_set.verified
    assert data_set.flip is flip
    assert data_set.train.images.dtype == torch.uint8
    assert int(data_set.train.images.max()) == 255
    assert data_set.fingerprint() == load(name).fingerprint()
    for split, total in ((data_set.train, train), (data_set.test, test)):
        assert (split.labels.bincount() - total / 10).abs().max() <= 4


def test_facts_agree_with_the_descriptions() -> None:
    known = {name: source.facts for name, source in DATASETS.items() if source.facts is not None}
    for name, published in known.items():
        source, (channels, height, width) = DATASETS[name], published.shape
        assert re.search(rf"\b{published.train:,} \+ {published.test:,}\b", source.description)
        assert f"{height}x{width}x{channels}" in source.description
        assert (
            published.classes == len(getattr(source, "classes", ()))
            or f"of {published.classes:,} classes" in source.description
        )
    assert set(known) == set(DATASETS) - {"folder", "npz", "shards", "huggingface"}


def test_embedded_file_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "digits", replace(DATASETS["digits"], sha256="0" * 64))
    with pytest.raises(DataError, match=r"digits.npz: another sha256"):
        load("digits")


def test_fingerprint_depends_on_all_images_and_labels() -> None:
    def fingerprint(train: Split, test: Split) -> str:
        return DataSet("x", train, test, ("a", "b", "c"), False, False, "", False).fingerprint()

    split = numbered(6)
    others = Split(split.images + 1, split.labels), Split(split.images, split.labels.flip(0))
    seen = {fingerprint(split, split)}
    seen |= {fingerprint(split, other) for other in others} | {fingerprint(other, split) for other in others}
    assert len(seen) == 5


# --- by name


def test_unknown_name() -> None:
    with pytest.raises(DataError, match=r"no data set 'cifar-10': did you mean cifar10\? expected fashion, digits"):
        load("cifar-10")
    with pytest.raises(DataError, match="no data set 'qqqqqqq': expected"):
        load("qqqqqqq")


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("fashion", "digits")])
def test_missing_files_say_what_to_download(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected") as caught:
        load(name, tmp_path, size=8)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(files.cifar())
    with pytest.raises(DataError, match=r"no data_batch_2 in .*cifar-10-batches-py, expected cifar-10-python.tar.gz"):
        load("cifar10", tmp_path)


def test_size_is_refused_for_images_of_a_fixed_size() -> None:
    assert load("digits", size=8).shape == (1, 8, 8)
    with pytest.raises(DataError, match="digits: size 32 for images of 8x8"):
        load("digits", size=32)


# --- CIFAR

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def test_cifar10_from_every_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    python = {f"cifar-10-batches-py/{name}": files.cifar() for name in BATCHES}
    binary = {f"cifar-10-batches-bin/{name}.bin": files.binary() for name in BATCHES}
    prints = set()
    for form, members in (("python", python), ("binary", binary)):
        extracted, packed = tmp_path / f"{form}-extracted", tmp_path / f"{form}-packed"
        for name, contents in members.items():
            (extracted / name).parent.mkdir(parents=True, exist_ok=True)
            (extracted / name).write_bytes(contents)
        packed.mkdir()
        files.archive(packed / f"cifar-10-{form}.tar.gz", members)
        for folder in (extracted, next(extracted.iterdir()), packed):
            with caplog.at_level(logging.WARNING, "harp"):
                data_set = load("cifar10", folder)
            assert (len(data_set.train), len(data_set.test), data_set.shape) == (25, 5, (3, 32, 32))
            assert not data_set.verified
            assert "not the published contents: data_batch_1" in data_set.source
            assert data_set.flip
            prints.add(data_set.fingerprint())
    assert len(prints) == 1
    assert "not the published contents" in caplog.text


def test_cifar10_is_verified_by_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.md5(files.binary()).hexdigest()
    for name in BATCHES:
        monkeypatch.setitem(CIFAR10[0].files, name, digest)
        (tmp_path / name).write_bytes(files.cifar(protocol=5))
    data_set = load("cifar10", tmp_path)
    assert data_set.verified
    assert data_set.source.endswith("checksums agree")


def test_cifar100_keeps_fine_labels(tmp_path: Path) -> None:
    entries = {"data": files.IMAGES, "coarse_labels": [1] * 5, "fine_labels": [99, 0, 5, 7, 50]}
    members = {f"cifar-100-python/{part}": pickle.dumps(entries, 2) for part in ("train", "test")}
    files.archive(tmp_path / "cifar-100-python.tar.gz", members)
    data_set = load("cifar100", tmp_path)
    assert data_set.num_classes == 100
    assert data_set.test.labels.tolist() == [99, 0, 5, 7, 50]
    assert "not the published" in data_set.source


def test_cifar100_binary_has_no_known_checksum(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.bin").write_bytes(files.binary(2))
    data_set = load("cifar100", tmp_path)
    assert not data_set.verified
    assert "no published checksum" in data_set.source


def test_label_out_of_range_is_refused(tmp_path: Path) -> None:
    for name in BATCHES:
        (tmp_path / name).write_bytes(pickle.dumps({b"data": files.IMAGES, b"labels": [0, 1, 10, 2, 3]}))
    with pytest.raises(DataError, match="cifar10: train label 10 at position 2, expected 0 to 9"):
        load("cifar10", tmp_path)


# --- MNIST, SVHN


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("compress", [False, True])
def test_mnist(name: str, compress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = files.RNG.integers(0, 256, (4, 28, 28), dtype=np.uint8), np.array([0, 9, 3, 3], np.uint8)
    (tmp_path / name).mkdir()
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            contents = files.idx(array)
            monkeypatch.setitem(DATASETS[name].digests, f"{part}-{kind}-ubyte", hashlib.md5(contents).hexdigest())
            path = tmp_path / name / f"{part}-{kind}-ubyte{'.gz' if compress else ''}"
            path.write_bytes(gzip.compress(contents) if compress else contents)
    data_set = load(name, tmp_path)
    assert data_set.verified
    assert data_set.flip is (name == "fashion-mnist")
    assert np.array_equal(data_set.train.images[:, 0].numpy(), images)
    assert data_set.test.labels.tolist() == [0, 9, 3, 3]
    path.write_bytes(gzip.compress(files.idx(labels[:3])) if compress else files.idx(labels[:3]))
    with pytest.raises(DataError, match=r"\(4, 28, 28\) images with \(3,\) labels"):
        load(name, tmp_path)


@pytest.mark.parametrize("compress", [False, True])
def test_svhn(compress: bool, tmp_path: Path) -> None:
    contents, x, _ = files.svhn(compress=compress)
    for part in ("train", "test"):
        (tmp_path / f"{part}_32x32.mat").write_bytes(contents)
    data_set = load("svhn", tmp_path)
    assert data_set.balanced
    assert data_set.flip
    assert not data_set.verified
    assert data_set.train.labels.tolist() == [1, 0, 3, 9]
    assert np.array_equal(data_set.train.images[2].numpy(), x[:, :, :, 2].transpose(2, 0, 1))


def test_svhn_wrong(tmp_path: Path) -> None:
    x = files.matrix("X", np.zeros((32, 32, 3, 2), np.uint8), 9, 2, "<")
    small = files.matrix("X", np.zeros((8, 8, 3, 2), np.uint8), 9, 2, "<")
    y = files.matrix("y", np.array([[1], [11]], np.uint8), 9, 2, "<")
    short = files.matrix("y", np.array([[1]], np.uint8), 9, 2, "<")
    for parts, message in (
        ([x], "variables X, expected X and y"),
        ([small, y], r"X is uint8 \(8, 8, 3, 2\)"),
        ([x, short], "1 labels, expected one for each of 2 images"),
        ([x, y], "label 11 in y"),
    ):
        (tmp_path / "train_32x32.mat").write_bytes(files.mat5(parts))
        with pytest.raises(DataError, match=message):
            load("svhn", tmp_path)


# --- data of the user


def test_folder(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("dog", "cat"):
            files.paint(tmp_path / part / name / "1.png", 6, 5)
    data_set = load("folder", tmp_path, size=4)
    assert (data_set.shape, data_set.classes, data_set.flip, data_set.verified) == (
        (3, 4, 4),
        ("cat", "dog"),
        True,
        False,
    )
    with pytest.raises(DataError, match="expected --size 64"):
        load("folder", tmp_path)


def arrays(**changes: Any) -> dict[str, Any]:
    images = files.RNG.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    labels = np.array([0, 1, 2, 0, 1, 2])
    return {"x_train": images, "y_train": labels, "x_test": images[:2], "y_test": labels[:2]} | changes


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((6, 8, 8), None, (1, 8, 8)),
        ((6, 8, 8, 1), (0, 3, 1, 2), (1, 8, 8)),
        ((6, 3, 8, 9), None, (3, 8, 9)),
        ((6, 8, 9, 3), (0, 3, 1, 2), (3, 8, 9)),
        ((6, 12, 8, 8), None, (12, 8, 8)),
        ((6, 8, 8, 12), (0, 3, 1, 2), (12, 8, 8)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
def test_npz(shape: Any, axes: Any, expected: Any, dtype: Any, tmp_path: Path) -> None:
    images = files.RNG.random(shape).astype(dtype) if dtype != np.uint8 else files.RNG.integers(0, 256, shape)
    images = images.astype(dtype)
    path = tmp_path / "mine.npz"
    path.write_bytes(files.npz(**arrays(x_train=images, x_test=images[:2], y_train=np.arange(6)[:, None] % 3)))
    data_set = load(str(path))
    assert data_set.shape == expected
    assert data_set.train.images.dtype == (torch.uint8 if dtype == np.uint8 else torch.float32)
    planes = images if axes is None else images.transpose(axes)
    assert np.array_equal(
        data_set.train.images.numpy().reshape(planes.shape), planes.astype(data_set.train.images.numpy().dtype)
    )
    assert data_set.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    x, _ = next(Batches(data_set.train, 4)(0))
    assert x.dtype == torch.float32
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    for other in (load("npz", path), load("mine.npz", tmp_path)):
        assert other.fingerprint() == data_set.fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_train": np.linspace(-1, 255, 6 * 25).reshape(6, 5, 5)},
            r"x_train images range from -1 to 255, expected .*\[0, 1\]",
        ),
        ({"x_test": np.full((2, 4, 5, 3), np.nan)}, "x_test images range from nan to nan"),
        ({"x_test": np.full((2, 4, 5, 3), np.inf)}, "x_test images range from inf to inf"),
        ({"x_train": np.zeros((6, 5, 5), np.int64)}, "int64, expected uint8 or float"),
        ({"x_train": np.zeros((6, 25))}, r"is \(6, 25\), expected"),
        ({"x_train": np.zeros((6, 5, 6, 7))}, r"is \(6, 5, 6, 7\), expected"),
        ({"x_train": np.zeros((0, 5, 5))}, r"is \(0, 5, 5\), expected"),
        ({"x_test": np.zeros((2, 9, 9))}, r"train and test images are \(3, 4, 5\) and \(1, 9, 9\)"),
        ({"y_train": np.array([0, 1, 2, 0, -1, 2])}, "y_train has -1 at position 4"),
        ({"y_train": np.array([0, 1, 2, 0, 1, 10**12])}, "y_train has 1000000000000 at position 5"),
        ({"y_train": np.array([0, 1, 3, 0, 1, 3])}, "y_train has no label 2, expected every one from 0 to 3"),
        ({"y_train": np.array([0.5, 1, 2, 0, 1, 2])}, "y_train holds float64, 0.5 at position 0"),
        ({"y_train": np.array([0, 1, 2])}, r"y_train is \(3,\), expected one label for each of 6"),
        ({"y_test": np.array([0, 3])}, "test label 3 at position 1, expected 0 to 2"),
    ],
)
def test_npz_wrong(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(files.npz(**arrays(**changes)))
    with pytest.raises(DataError, match=message):
        load("npz", tmp_path)


def test_npz_rounding_errors_are_clipped(tmp_path: Path) -> None:
    images = np.full((6, 5, 5), 1 + 5e-7)
    images[0] = -5e-7
    (tmp_path / "data.npz").write_bytes(files.npz(**arrays(x_train=images, x_test=images[:2])))
    data_set = load("npz", tmp_path)
    assert (float(data_set.train.images.min()), float(data_set.train.images.max())) == (0, 1)


def test_split_checks_its_tensors() -> None:
    for images, labels in (
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 3, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 3, 3), torch.zeros(2)),
        (torch.zeros(2, 1, 3, 3), torch.zeros(3, dtype=torch.int64)),
    ):
        with pytest.raises(DataError, match="expected"):
            Split(images, labels)
    assert numbers(numbered(9).select([4, 0, 4]).images.float() / 255) == [4, 0, 4]


# --- holdout


@quick
@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.data(), st.integers(0, 2**40))
def test_holdout(labels: list[int], choose: st.DataObject, seed: int) -> None:
    size = choose.draw(st.integers(1, len(labels) - 1))
    split = Split(numbered(len(labels)).images, torch.tensor(labels))
    rest, held = holdout(split, size, seed)
    assert len(held) == size
    kept, taken = (numbers(part.images.float() / 255) for part in (rest, held))
    assert sorted(kept + taken) == list(range(len(labels)))
    assert kept == sorted(kept)
    assert [labels[i] for i in taken] == held.labels.tolist()
    for label in set(labels):
        assert abs(held.labels.tolist().count(label) - labels.count(label) * size / len(labels)) < 1
    again = holdout(split, size, seed)[1]
    assert torch.equal(again.images, held.images)


def test_holdout_depends_on_the_seed_and_refuses_invalid_sizes() -> None:
    split = numbered(200)
    assert not torch.equal(holdout(split, 50, 0)[1].images, holdout(split, 50, 1)[1].images)
    for size in (0, -1, 200, 201):
        with pytest.raises(DataError, match=f"hold-out of {size} from 200 images, expected 1 to 199"):
            holdout(split, size, 0)
