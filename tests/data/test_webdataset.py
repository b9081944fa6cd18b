"""Writing shards: the same bytes each time, whole or not at all, and the same images."""

import io
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from harp.data.registry import load
from harp.data.webdataset import write_shards
from harp.errors import DataError, RecipeError
from harp.system import files
from support.commands import Harp
from support.pictures import encoded, fill

pillow = pytest.importorskip("PIL.Image")


def archives(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def test_shards_hold_the_same_images(tmp_path: Path) -> None:
    source = fill(tmp_path / "pictures")
    pillow.open(io.BytesIO(encoded(5))).save(source / "train/class0/other.bmp")
    written = write_shards(source, tmp_path / "out", count=8)
    assert (written.images, written.shards, written.undecodable) == (39, 4 + 1, [])
    shards, expected = load("shards", tmp_path / "out", 8), load("folder", source, 8)
    assert shards.classes == expected.classes
    assert torch.equal(shards.test.images, expected.test.images)
    assert torch.equal(shards.test.labels, expected.test.labels)
    first, second = (
        sorted(zip(each.train.labels.tolist(), each.train.images.flatten(1).tolist(), strict=True))
        for each in (shards, expected)
    )
    assert first == second
    assert shards.train.labels.tolist() != sorted(shards.train.labels.tolist())  # shuffled


def test_an_interrupted_command_writes_the_missing_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fill(tmp_path / "pictures")
    write_shards(source, tmp_path / "once", count=8, size=10)
    atomic = files.atomic

    def interrupted(path: Path, *size: int) -> AbstractContextManager[Path]:
        if path.name == "train-000002.tar":
            raise KeyboardInterrupt
        return atomic(path, *size)

    with monkeypatch.context() as patched:
        patched.setattr(files, "atomic", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_shards(source, tmp_path / "twice", count=8, size=10)
    assert list(archives(tmp_path / "twice")) == ["train-000000.tar", "train-000001.tar"]
    write_shards(source, tmp_path / "twice", count=8, size=10)
    assert archives(tmp_path / "once") == archives(tmp_path / "twice")
    assert not [path for path in (tmp_path / "twice").iterdir() if path.name.endswith(".tmp")]


def test_other_images_or_options_are_refused(tmp_path: Path) -> None:
    source = fill(tmp_path / "pictures", 6, 3)
    write_shards(source, tmp_path / "out", count=8)
    for change in ({"count": 7}, {"size": 9}):
        with pytest.raises(DataError, match="shards of other images or options"):
            write_shards(source, tmp_path / "out", **{"count": 8, **change})
    (source / "train/class0/new.jpg").write_bytes(encoded(99))
    with pytest.raises(DataError, match="shards of other images or options"):
        write_shards(source, tmp_path / "out", count=8)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine.tar").write_bytes(b"")
    with pytest.raises(DataError, match="has archives already"):
        write_shards(source, tmp_path / "taken")
    with pytest.raises(RecipeError, match="give at least 1"):
        write_shards(source, tmp_path / "out", count=0)


def test_larger_images_are_resized(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        (tmp_path / part / "a/large.jpg").write_bytes(encoded(1, 60, 40))
        (tmp_path / part / "a/small.jpg").write_bytes(encoded(2, 12, 9))
        (tmp_path / part / "a/spoilt.jpg").write_bytes(encoded(3)[:-300])
        (tmp_path / part / "a/large.png").write_bytes(encoded(4, 30, 60, "PNG"))
    written = write_shards(tmp_path, tmp_path / "out", size=20)
    assert (written.images, len(written.undecodable)) == (6, 2)
    (tmp_path / "out/test-000000.tar").unlink()
    for _ in range(2):  # one of the two is there, and then both
        again = write_shards(tmp_path, tmp_path / "out", size=20)
        assert (again.images, again.shards, len(again.undecodable)) == (6, 2, 2)
    assert sorted(text.split(":")[0] for text in again.undecodable) == [
        str(tmp_path / part / "a/spoilt.jpg") for part in ("test", "train")
    ]
    whole = (tmp_path / "out/test-000000.tar").read_bytes()
    (tmp_path / "out/test-000000.tar").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"test-000000.tar: no readable archive"):
        write_shards(tmp_path, tmp_path / "out", size=20)
    (tmp_path / "out/test-000000.tar").write_bytes(whole)
    images = load("shards", tmp_path / "out", 8, stream=True).test.images
    sizes = []
    for place in images.places(torch.arange(3)):
        with open(place.path, "rb") as file:
            file.seek(place.offset)
            sizes.append(pillow.open(io.BytesIO(file.read(place.size))).size)
    assert sorted(sizes) == [(12, 9), (20, 40), (30, 20)]


def test_the_shard_command(harp: Harp, tmp_path: Path) -> None:
    fill(tmp_path / "pictures", 6, 3)
    code, out, _ = harp("shard", "pictures", "out", "--count", "4", "--size", "8")
    assert code == 0 and "9 images in 3 shards: out" in out
    assert len(load("shards", tmp_path / "out", 8).train) == 6
    code, _, err = harp("shard", "nothing", "out")
    assert code == 2 and "expected the folders train and test" in err and len(err.splitlines()) == 1
