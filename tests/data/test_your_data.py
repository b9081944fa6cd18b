"""Data of a user: folders of images in the layouts that people have, arrays under other names, Hugging Face on disk."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from harp.data.dataset import DataSet, draw_test
from harp.data.registry import find, load
from harp.errors import DataError, MissingExtra
from support import data_files as files


def paint(*folders: Path, count: int = 5) -> None:
    for folder in folders:
        for number in range(count):
            files.paint(folder / f"{number}.png", 6, 5, (number, len(folder.name), 0))


def tree(root: Path, *parts: str) -> Path:
    paint(*(root / part / name for part in parts for name in ("cat", "dog")))
    return root


def sizes(data: DataSet) -> tuple[int, int, bool]:
    return len(data.train), len(data.test), data.drawn


@pytest.mark.parametrize("part", ["test", "val", "valid", "validation", "Test", "VAL"])
def test_folders_of_test_images_by_their_usual_names(part: str, tmp_path: Path) -> None:
    data = load(str(tree(tmp_path / "pets", "Train" if part[0].isupper() else "train", part)), size=4)
    assert sizes(data) == (10, 10, False) and data.classes == ("cat", "dog")


@pytest.mark.parametrize("parts", [("",), ("train",), ("train", "test/unlabelled")])
def test_without_test_images_a_fifth_of_each_class_is_drawn(
    parts: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tree(tmp_path / "pets", parts[0])
    if len(parts) > 1:
        files.paint(root / "test/1.png", 6, 5)  # no class
    with caplog.at_level(logging.INFO, "harp"):
        data = load(str(root), size=4)
    assert sizes(data) == (8, 2, True) and data.test.labels.tolist() == [0, 1]
    assert "2 of its 10 images, 20% of each class and always the same" in caplog.text
    assert load(str(root), size=4).fingerprint() == data.fingerprint()
    streamed = load(str(root), size=4, stream=True)
    assert torch.equal(streamed.test.images[:], data.test.images)
    paint(root / parts[0] / "cat", count=6)
    assert load(str(root), size=4).fingerprint() != data.fingerprint()


def test_one_level_too_high_or_too_low_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path / "downloads/pets", "train", "val")
    expected = load(str(root), size=4).fingerprint()
    for place in (tmp_path, tmp_path / "downloads", root / "train", root / "val"):
        assert load(str(place), size=4).fingerprint() == expected


def test_a_folder_of_nothing_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"expected the folders train and test .*; there is notes.txt$"):
        load(str(tmp_path), size=4)
    files.paint(tmp_path / "cat/1.png", 6, 5)
    paint(tmp_path / "dog")
    with pytest.raises(DataError, match="a class with one image, expected 2 or more"):
        load(str(tmp_path), size=4)
    with pytest.raises(DataError, match="is a file: expected a folder of images"):
        find(str(tmp_path / "notes.txt"))


def test_the_share_of_test_images() -> None:
    labels = torch.tensor([0] * 50 + [1] * 10)
    assert labels[draw_test(labels, "x")].bincount().tolist() == [10, 2]


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("X_train", "Y_train", "X_test", "Y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("train_x", "train_y", "val_x", "val_y"),
        ("train_data", "train_targets", "valid_data", "valid_targets"),
        ("images", "labels"),
        ("x", "y"),
    ],
)
def test_arrays_by_the_usual_names(names: tuple[str, ...], tmp_path: Path) -> None:
    images, labels = np.arange(10 * 48, dtype=np.float64).astype(np.uint8).reshape(10, 4, 4, 3), np.arange(10) % 2
    arrays = dict(zip(names, [images, labels] * 2, strict=False))
    (tmp_path / "mine.npz").write_bytes(files.npz(**arrays))
    data = load(str(tmp_path / "mine.npz"))
    assert sizes(data) == ((10, 10, False) if len(names) > 2 else (8, 2, True))


def test_arrays_by_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(files.npz(a=np.zeros(3), b=np.zeros(3)))
    with pytest.raises(DataError, match="no images and labels to train on among a, b, expected x_train"):
        load(str(tmp_path / "mine.npz"))


def test_paths_are_looked_for_in_the_data_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root in (Path("pets"), Path("data/pets"), Path("elsewhere")):
        tree(root, "")
    assert find("pets").path == Path("pets")
    assert find("pets", "data").path == Path("data/pets")
    assert find("/gone/pets", "data").path == Path("data/pets")
    assert find("pets", "elsewhere").path == Path("elsewhere")


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("data/cifar-10-batches-py", "data"),
        ("data/cifar-10-batches-py", "data/cifar-10-batches-py"),
        ("data/vision/cifar-10-batches-py", "data"),
        ("data/cifar10", "data"),
        ("data/cifar-10-batches-py", "data/empty"),
    ],
)
def test_published_files_one_level_up_or_down(layout: str, given: str, tmp_path: Path) -> None:
    (tmp_path / "data/empty").mkdir(parents=True)
    (tmp_path / layout).mkdir(parents=True)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (tmp_path / layout / name).write_bytes(files.cifar())
    assert len(load("cifar10", tmp_path / given).train) == 25


def test_data_sets_of_the_same_file_names_are_told_apart(tmp_path: Path) -> None:
    for folder, shade in (("FashionMNIST/raw", 1), ("MNIST/raw", 2)):
        (tmp_path / folder).mkdir(parents=True)
        for part in ("train", "t10k"):
            images, labels = np.full((3, 28, 28), shade, np.uint8), np.arange(3, dtype=np.uint8)
            (tmp_path / folder / f"{part}-images-idx3-ubyte").write_bytes(files.idx(images))
            (tmp_path / folder / f"{part}-labels-idx1-ubyte").write_bytes(files.idx(labels))
    assert [int(load(name, tmp_path).train.images.max()) for name in ("fashion-mnist", "mnist")] == [1, 2]
    shutil.rmtree(tmp_path / "MNIST")
    with pytest.raises(DataError, match=r"mnist: no train-images.*there is FashionMNIST/$"):
        load("mnist", tmp_path)


def test_missing_files_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no train_32x32.mat in .*, expected train_32x32.mat and .*; there is no such folder"
    ):
        load("svhn", tmp_path / "nothing")
    for number in range(9):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(DataError, match=r"there is 0.txt, 1.txt, .*5.txt and 3 more$"):
        load("svhn", tmp_path)


def test_a_published_data_set_by_its_folder_is_told_its_name(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").touch()
    with pytest.raises(DataError, match="a data set with a name: --data cifar10 --data-dir"):
        load(str(tmp_path))


def test_hugging_face_on_disk(tmp_path: Path) -> None:
    files.save_to_disk(tmp_path / "hub", [files.png(7, 6, (n, 0, 0)) for n in range(10)], ["cat", "dog"])
    data = load(str(tmp_path / "hub"), size=4)
    assert sizes(data) == (8, 2, True) and data.classes == ("cat", "dog") and data.shape == (3, 4, 4)
    assert find(str(tmp_path / "hub")).first_size() == (7, 6)
    with pytest.raises(DataError, match="no image size"):
        load(str(tmp_path / "hub"))


def test_hugging_face_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_dict.json").touch()
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r'pip install "harp-prune\[huggingface\]"'):
        load(str(tmp_path), size=4)
