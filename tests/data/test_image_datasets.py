"""Large image data sets, in the published layouts and the usual ones."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harp.data.datasets.image_folder import class_names
from harp.data.formats.bounded import Payload
from harp.data.formats.byte_ranges import Names
from harp.data.formats.matlab import read_mat5_records
from harp.data.formats.tar import TarIndex
from harp.data.registry import load
from harp.data.streaming.images import Streamed
from harp.errors import DataError
from support.pictures import encoded, fill, tar, tar_bytes

pytest.importorskip("PIL.Image")

SYNSETS = ("n01440764", "n01443537", "n02012849")
# The kit numbers the classes in another order than that of the synsets.
NUMBERS = {"n01440764": 2, "n01443537": 3, "n02012849": 1}


def name_of(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def truth(number: int) -> str:
    return SYNSETS[(number * 2) % 3]


def make_train(root: Path) -> None:
    for synset in SYNSETS:
        for number in range(4):
            path = root / "train" / synset / f"{synset}_{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(NUMBERS[synset] * 10 + number))


def make_val(folder: Path, *, sorted_out: bool) -> None:
    for number in range(1, 7):
        path = folder / (truth(number) if sorted_out else "") / name_of(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(100 + number))


def kit_files() -> dict[str, bytes]:
    scipy = pytest.importorskip("scipy.io")
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("children", "O")]
    words = {"n01440764": "tench, Tinca tinca", "n01443537": "crane", "n02012849": "crane, bird"}
    records = np.zeros((4, 1), kinds)
    for row, synset in enumerate(sorted(SYNSETS, key=NUMBERS.__getitem__)):
        records[row, 0] = (np.float64(NUMBERS[synset]), synset, words[synset], "a fish é", np.zeros((1, 0)))
    records[3, 0] = (np.float64(1001), "n00001740", "entity", "an inner node", np.array([[1.0, 2.0]]))
    buffer = io.BytesIO()
    scipy.savemat(buffer, {"other": np.ones(3), "synsets": records}, do_compression=True)
    lines = "".join(f"{NUMBERS[truth(number)]}\n" for number in range(1, 7))
    return {"data/meta.mat": buffer.getvalue(), "data/ILSVRC2012_validation_ground_truth.txt": lines.encode()}


def make_kit(root: Path, *, archive: bool) -> None:
    members = {f"ILSVRC2012_devkit_t12/{name}": data for name, data in kit_files().items()}
    if archive:
        with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as packed:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                packed.addfile(member, io.BytesIO(data))
        return
    for name, data in members.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def images_of(data: Any) -> dict[str, tuple[int, list[int]]]:
    """Label and pixels by the file's name, of both parts."""
    images = {}
    for split in (data.train, data.test):
        for row, place in enumerate(split.images.places(torch.arange(len(split)))):
            images[Path(place.name).name] = int(split.labels[row]), split.images[row].flatten().tolist()
    return images


def test_imagenet_is_the_same_in_every_layout(tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    make_train(folders)
    make_val(folders / "val", sorted_out=True)
    expected = load("imagenet", folders, 16, margin=256 / 224)
    assert (len(expected.train), len(expected.test), expected.shape) == (12, 6, (3, 16, 16))
    assert expected.classes == SYNSETS
    assert isinstance(expected.train.images, Streamed)
    known = images_of(expected)
    assert all(known[name_of(number)][0] == SYNSETS.index(truth(number)) for number in range(1, 7))

    flat = tmp_path / "flat" / "imagenet"
    make_train(flat)
    make_val(flat / "val", sorted_out=False)
    make_kit(flat, archive=False)
    archives = tmp_path / "archives"
    inner = {
        f"{synset}.tar": tar_bytes(
            {path.name: path.read_bytes() for path in sorted((folders / "train" / synset).iterdir())}
        )
        for synset in reversed(SYNSETS)
    }
    tar(archives / "ILSVRC2012_img_train.tar", inner)
    members = {path.name: path.read_bytes() for path in sorted((flat / "val").iterdir(), reverse=True)}
    tar(archives / "ILSVRC2012_img_val.tar", members)
    make_kit(archives, archive=True)
    for root in (tmp_path / "flat", archives, archives):  # the second time from the cached index
        data_set = load("imagenet", root, 16, margin=256 / 224)
        assert images_of(data_set) == known
        assert data_set.classes == ("tench", "crane (n01443537)", "crane (n02012849)")
        assert "12 + 6 images of 3 classes" in data_set.source
    assert len(list(archives.glob(".harp-index-*.npz"))) == 2
    assert load("imagenet", folders, stream=True).shape == (3, 224, 224)


def test_imagenet_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"imagenet: no train or ILSVRC2012_img_train.tar in"):
        load("imagenet", tmp_path)
    make_train(tmp_path)
    with pytest.raises(DataError, match=r"no val or ILSVRC2012_img_val.tar in"):
        load("imagenet", tmp_path)
    make_val(tmp_path / "val", sorted_out=False)
    with pytest.raises(DataError, match=r"no ILSVRC2012_devkit_t12.tar.gz in .* labels of val"):
        load("imagenet", tmp_path)
    make_kit(tmp_path, archive=False)
    (tmp_path / "val" / name_of(7)).write_bytes(b"")
    with pytest.raises(DataError, match="image number 7, expected 1 to 6"):
        load("imagenet", tmp_path)
    (tmp_path / "val" / name_of(7)).unlink()
    (tmp_path / "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt").write_text("1\n5\n")
    with pytest.raises(DataError, match=r"'5' in line 2, expected a class of meta.mat"):
        load("imagenet", tmp_path)


@pytest.mark.parametrize("cut", [100, 600, 1500, 5000])
def test_a_truncated_archive_gives_an_error_of_one_line(cut: int, tmp_path: Path) -> None:
    inner = {f"{synset}.tar": tar_bytes({f"{synset}_1.JPEG": encoded(1, 60, 60)}) for synset in SYNSETS}
    path = tar(tmp_path / "ILSVRC2012_img_train.tar", inner)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match="damaged or truncated after") as caught:
        load("imagenet", tmp_path)
    assert "\n" not in str(caught.value)


def test_an_inner_archive_without_its_end_is_refused(tmp_path: Path) -> None:
    inner = tar_bytes({"a.JPEG": bytes(512)})
    tar(tmp_path / "ILSVRC2012_img_train.tar", {"n1.tar": inner[:1024], "n2.tar": inner})
    with pytest.raises(DataError, match=r"n1.tar: damaged or truncated after 1 files"):
        load("imagenet", tmp_path)


def test_records_of_a_mat_file() -> None:
    meta = kit_files()["data/meta.mat"]
    records = read_mat5_records(Payload("meta.mat", meta), "synsets")
    assert [record["ILSVRC2012_ID"] for record in records] == [1, 2, 3, 1001]
    assert records[1]["WNID"] == "n01440764" and records[1]["words"] == "tench, Tinca tinca"
    assert "é" in str(records[1]["gloss"])
    with pytest.raises(DataError, match="no structure 'nothing'"):
        read_mat5_records(Payload("meta.mat", meta), "nothing")
    for cut in (200, len(meta) - 20):
        with pytest.raises(DataError):
            read_mat5_records(Payload("meta.mat", meta[:cut]), "synsets")


def test_equal_class_names_get_their_synset() -> None:
    assert class_names(("a", "b", "c"), {"a": "crane, bird", "b": "crane"}) == ("crane (a)", "crane (b)", "c")


def test_tiny_imagenet(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    for synset in SYNSETS[:2]:
        for number in range(3):
            path = root / "train" / synset / "images" / f"{synset}_{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(number, 64, 64))
    (root / "val/images").mkdir(parents=True)
    (root / "val/images/val_0.JPEG").write_bytes(encoded(9, 64, 64))
    (root / "val/val_annotations.txt").write_text(f"val_0.JPEG\t{SYNSETS[1]}\t0\t0\t62\t62\n")
    (root / "test/images").mkdir(parents=True)  # published without labels
    (root / "test/images/test_0.JPEG").write_bytes(encoded(8, 64, 64))
    (root / "wnids.txt").write_text("\n".join(SYNSETS[1::-1]))
    (root / "words.txt").write_text("n01440764\ttench, Tinca tinca\nn01443537\tgoldfish, Carassius auratus\n")
    data_set = load("tiny-imagenet", tmp_path)
    assert (data_set.shape, data_set.classes) == ((3, 64, 64), ("tench", "goldfish"))
    assert data_set.test.labels.tolist() == [1] and len(data_set.train) == 6
    lazy = load("tiny-imagenet", root, stream=True)
    assert torch.equal(lazy.train.images[:], data_set.train.images)
    sorted_out = root / "val" / SYNSETS[1]  # a usual layout, with the list still there
    (root / "val/images").rename(sorted_out)
    assert torch.equal(load("tiny-imagenet", tmp_path).test.images, data_set.test.images)
    (root / "val/val_annotations.txt").unlink()
    assert load("tiny-imagenet", tmp_path).test.labels.tolist() == [1]
    with pytest.raises(DataError, match="tiny-imagenet: no train and val in"):
        load("tiny-imagenet", tmp_path / "nowhere")


# --- shards


def shard(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> Path:
    return tar(path, {f"{key}.{ending}": data for key, parts in samples for ending, data in parts.items()})


def make_shards(root: Path) -> None:
    for number in range(2):
        shard(
            root / f"train-{number:06d}.tar",
            [(f"a/{number}{k}", {"jpg": encoded(10 * number + k), "cls": f"{k % 3}\n".encode()}) for k in range(4)],
        )
    extra = {"json": b'{"label": 2, "more": [1]}', "PNG": encoded(50, kind="PNG"), "txt": b"a caption", "seg.png": b""}
    shard(root / "val-000000.tar", [("x", extra), ("y", {"cls": b"0", "json": b"{}", "jpeg": encoded(51)})])


def test_shards(tmp_path: Path) -> None:
    make_shards(tmp_path)
    data_set = load("shards", tmp_path, 8, stream=True)
    assert (len(data_set.train), data_set.classes) == (8, ("0", "1", "2"))
    assert data_set.train.labels.tolist() == [0, 1, 2, 0] * 2
    assert data_set.test.labels.tolist() == [2, 0]
    (tmp_path / "loose/train/c").mkdir(parents=True)
    (tmp_path / "loose/test/c").mkdir(parents=True)
    (tmp_path / "loose/train/c/1.jpg").write_bytes(encoded(12))
    (tmp_path / "loose/test/c/1.png").write_bytes(encoded(50, kind="PNG"))
    loose = load("folder", tmp_path / "loose", 8)
    assert torch.equal(data_set.train.images[6], loose.train.images[0])
    assert torch.equal(data_set.test.images[0], loose.test.images[0])
    assert torch.equal(load("shards", tmp_path, 8).train.images, data_set.train.images[:])
    (tmp_path / "classes.txt").write_text("ape\nbee\ncat\ndog\n")
    assert load("shards", tmp_path, 8).classes == ("ape", "bee", "cat", "dog")
    (tmp_path / "classes.txt").write_text("ape\n")
    with pytest.raises(DataError, match="label 1 at position 1, expected 0 to 0"):
        load("shards", tmp_path, 8)


def test_the_index_of_shards_is_cached_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "data"
    make_shards(root)
    fingerprint = load("shards", root, 8, stream=True).fingerprint()
    indices = sorted(root.glob(".harp-index-*.npz"))
    assert len(indices) == 2
    with monkeypatch.context() as without:
        without.setattr(TarIndex, "__iter__", None)
        assert load("shards", root, 8, stream=True).fingerprint() == fingerprint
    for damaged in (b"", b"nothing", indices[0].read_bytes()[:-50]):
        for path in indices:
            path.write_bytes(damaged)
        assert load("shards", root, 8, stream=True).fingerprint() == fingerprint
    arrays = dict(np.load(indices[0]))
    np.savez(indices[0], **(arrays | {"offsets": arrays["offsets"] + 10**9}))
    assert load("shards", root, 8, stream=True).fingerprint() == fingerprint
    shard(root / "train-000001.tar", [("b", {"jpg": encoded(77), "cls": b"1"})])
    assert len(load("shards", root, 8, stream=True).train) == 5
    for path in sorted(root.glob(".harp-index-*.npz")):
        path.unlink()
        path.mkdir()  # can't be written there
    assert len(load("shards", root, 8, stream=True).train) == 5
    assert len(list((tmp_path / "cache").rglob("index-*.npz"))) == 2


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([("k", {"jpg": b"x"})], "no label for k"),
        ([("k", {"cls": b"1"})], "no image for k"),
        ([("k", {"jpg": b"x", "cls": b"cat"})], "expected a label from 0 up"),
        ([("k", {"jpg": b"x", "cls": b"-1"})], "expected a label from 0 up"),
        ([("k", {"jpg": b"x", "cls": b"2000000000"})], "expected a label from 0 up to 1,048,575"),
        ([("k", {"jpg": b"x", "json": b'{"label": true}'})], "expected a label from 0 up"),
        ([("k", {"jpg": b"x", "json": b"no json"})], "no label for k"),
        ([("k", {"jpg": b"x", "png": b"y", "cls": b"1"})], "expected one image a key"),
    ],
)
def test_invalid_shards_are_refused(samples: Any, message: str, tmp_path: Path) -> None:
    make_shards(tmp_path)
    shard(tmp_path / "train-000000.tar", samples)
    with pytest.raises(DataError, match=message):
        load("shards", tmp_path, 8)


def test_truncated_shards_are_refused(tmp_path: Path) -> None:
    make_shards(tmp_path)
    whole = (tmp_path / "train-000000.tar").read_bytes()
    for cut in (0, 100, 700, 2000):
        (tmp_path / "train-000000.tar").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"train-000000.tar: damaged or truncated after"):
            load("shards", tmp_path, 8)
    (tmp_path / "train-000000.tar").write_bytes(b"\x1f\x8b" + whole)
    with pytest.raises(DataError, match="expected an uncompressed tar archive"):
        load("shards", tmp_path, 8)


def test_packed_names_are_restored_exactly() -> None:
    texts = ["a", "", "ü/é.jpg", b"\xff\xfe".decode("utf-8", "surrogateescape")]
    packed = Names.of(texts)
    assert [packed[row] for row in range(len(packed))] == texts


def test_files_of_a_folder_are_sorted_by_name(tmp_path: Path) -> None:
    fill(tmp_path, 6, 3)
    (tmp_path / "train/class0/deep").mkdir()
    (tmp_path / "train/class0/deep/1.jpg").write_bytes(encoded(1))
    (tmp_path / "train/class0/.hidden.jpg").write_bytes(b"")
    images = load("folder", tmp_path, 8, stream=True).train.images
    names = [Path(place.name).relative_to(tmp_path).as_posix() for place in images.places(torch.arange(len(images)))]
    assert names == sorted(names) and len(names) == 7
