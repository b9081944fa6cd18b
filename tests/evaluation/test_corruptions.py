"""Common corruptions: the published layouts are read, and files that are not as published end in one line."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from harp.data.dataset import DataSet, Split
from harp.errors import DataError
from harp.evaluation import results
from harp.evaluation.accuracy import Subject
from harp.evaluation.corruptions import KINDS, SEVERITIES, find, measure_all
from harp.evaluation.results import Audit

N, SIDE, CLASSES = 6, 8, 3


def data_set(labels: Tensor | None = None) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (N, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    split = Split(images, torch.arange(N) % CLASSES if labels is None else labels)
    return DataSet("toy", split, split, ("a", "b", "c"), balanced=False, flip=False, source="", verified=False)


def grey(severity: int, image: int) -> int:
    """The pixel value of the corrupted images here, which names the severity and the image."""
    return 40 * severity + image


def write_cifar(folder: Path, kinds: tuple[str, ...] = KINDS) -> Path:
    """The layout of CIFAR-10-C, with labels as bytes as they were published."""
    folder.mkdir()
    values = [grey(severity, image) for severity in SEVERITIES for image in range(N)]
    array = np.broadcast_to(np.array(values, np.uint8)[:, None, None, None], (5 * N, SIDE, SIDE, 3))
    for kind in kinds:
        np.save(folder / f"{kind}.npy", np.ascontiguousarray(array))
    np.save(folder / "labels.npy", np.tile(np.arange(N, dtype=np.uint8) % CLASSES, 5))
    return folder


def write_imagenet(folder: Path, kinds: tuple[str, ...] = ("fog",), classes: int = CLASSES) -> Path:
    """The layout of ImageNet-C, with two images in each class."""
    for kind in kinds:
        for severity in SEVERITIES:
            for label in range(classes):
                place = folder / kind / str(severity) / f"n{label:08d}"
                place.mkdir(parents=True)
                for number in range(2):
                    pixel = (grey(severity, label),) * 3
                    Image.new("RGB", (SIDE, SIDE), pixel).save(place / f"ILSVRC2012_val_{number:08d}.JPEG")
    return folder


class ByBrightness(nn.Module):
    """Classifies an image of `grey` by its number, and above a severity always as class 0."""

    def __init__(self, last: int = 5) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        value = (x.mean((1, 2, 3)) * 255).round().long()
        image, severity = value % 40, value // 40
        label = torch.where(severity > self.last, 0, image % CLASSES)
        return nn.functional.one_hot(label, CLASSES).float()


def test_the_files_of_cifar_10_c(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "CIFAR-10-C")
    np.save(folder / "speckle_noise.npy", np.zeros(3))  # one of the four kinds for validation: not read
    corrupted = find(folder, data_set())
    parts = corrupted.parts
    assert [(part.kind, part.severity) for part in parts] == [(kind, s) for kind in KINDS for s in SEVERITIES]
    for part in parts[5:10]:
        split = part.load()
        assert split.images.shape == (N, 3, SIDE, SIDE) and split.images.dtype == torch.uint8
        assert split.images[:, 0, 0, 0].tolist() == [grey(part.severity, image) for image in range(N)]
        assert torch.equal(split.labels, torch.arange(N) % CLASSES)
    found = measure_all(ByBrightness(last=3), corrupted, examples=None, seed=0, batch=4)
    assert len(found["rows"]) == 75 and found["missing"] == []
    by_severity = [row["value"] for row in found["rows"][:5]]
    assert by_severity == pytest.approx([1, 1, 1, 1 / 3, 1 / 3])
    assert found["mean"] == pytest.approx(sum(by_severity) / 5)
    assert all(row["n"] == N and row["low"] <= row["value"] <= row["high"] for row in found["rows"])


def test_the_folders_of_imagenet_c(tmp_path: Path) -> None:
    corrupted = find(write_imagenet(tmp_path / "ImageNet-C"), data_set())
    parts = corrupted.parts
    assert [(part.kind, part.severity) for part in parts] == [("fog", severity) for severity in SEVERITIES]
    split = parts[1].load()
    assert split.labels.tolist() == [0, 0, 1, 1, 2, 2] and split.images.shape == (6, 3, SIDE, SIDE)
    found = measure_all(ByBrightness(last=2), corrupted, examples=None, seed=0, batch=4)
    assert [row["value"] for row in found["rows"]] == pytest.approx([1, 1, 1 / 3, 1 / 3, 1 / 3])
    assert found["missing"] == [kind for kind in KINDS if kind != "fog"]


def test_examples_are_the_same_images_at_every_severity(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Recorder(ByBrightness):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                seen.append(((x.mean((1, 2, 3)) * 255).round().long() % 40).tolist())
            return super().forward(x)

    corrupted = find(write_cifar(tmp_path / "c", ("snow",)), data_set())
    counts: list[tuple[float, int, str]] = []
    found = measure_all(Recorder(), corrupted, examples=4, seed=1, batch=8, progress=lambda *call: counts.append(call))
    assert len(seen) == 5 and len({tuple(images) for images in seen}) == 1 and len(seen[0]) == 4
    assert [row["n"] for row in found["rows"]] == [4] * 5
    assert counts[-1] == (5, 5, "snow 5")


def test_the_result_is_kept_for_these_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = write_cifar(tmp_path / "CIFAR-10-C", KINDS[:2]), data_set()

    def audit() -> Audit:
        return Audit(Subject(ByBrightness(3), data), tmp_path / "results", batch=4)

    first = audit().corruptions(find(folder, data))
    assert first["kind"] == "corruptions" and first["files"] == "CIFAR-10-C" and first["n"] == N
    with monkeypatch.context() as patch:
        patch.setattr(results, "measure_all", lambda *_, **__: pytest.fail("measured again"))
        assert audit().corruptions(find(folder, data)) == first
    np.save(folder / f"{KINDS[0]}.npy", np.zeros((5 * N, SIDE, SIDE, 3), np.uint8))
    assert audit().corruptions(find(folder, data))["mean"] < first["mean"]


def header(shape: str, dtype: str = "|u1") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


WRONG: dict[str, bytes] = {
    "a size that is not in the file": header("(1000000000000, 8, 8, 3)") + bytes(100),
    "a size beyond any number": header(f"({10**30}, 8, 8, 3)") + bytes(100),
    "other images": header("(30, 8, 8, 1)") + bytes(30 * 64),
    "another type": header("(30, 8, 8, 3)", "<f4") + bytes(30 * 192 * 4),
    "truncated": header("(30, 8, 8, 3)") + bytes(30 * 192 - 1),
    "objects": header("(30, 8, 8, 3)", "|O") + pickle.dumps([print]),
    "a pickle": pickle.dumps(print),
    "nothing": b"",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "c", ("fog", "snow"))
    (folder / "fog.npy").write_bytes(WRONG[name])
    with pytest.raises(DataError, match=r"fog\.npy") as error:
        find(folder, data_set())
    assert "\n" not in str(error.value)


def test_a_folder_of_other_images_is_refused(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "c", ("fog",))
    with pytest.raises(DataError, match="other labels than those of the test images of toy"):
        find(folder, data_set((torch.arange(N) + 1) % CLASSES))
    np.save(folder / "labels.npy", np.zeros(3, np.uint8))
    with pytest.raises(DataError, match=r"labels\.npy.*expected integers \(30,\)"):
        find(folder, data_set())
    (folder / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels\.npy"):
        find(folder, data_set())
    with pytest.raises(DataError, match="2 class folders, expected the 3 of toy"):
        find(write_imagenet(tmp_path / "two classes", classes=2), data_set())
    partial = write_imagenet(tmp_path / "partial")
    (partial / "fog" / "3").rename(partial / "fog" / "other")
    with pytest.raises(DataError, match="expected the severities 1 to 5 of fog"):
        find(partial, data_set())
    for empty in (tmp_path / "no such folder", tmp_path):
        with pytest.raises(DataError, match="no corrupted images, expected the files of CIFAR-10-C"):
            find(empty, data_set())


def test_an_image_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = write_imagenet(tmp_path / "c")
    broken = next((folder / "fog" / "2").rglob("*.JPEG"))
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(DataError, match=broken.name):
        measure_all(ByBrightness(), find(folder, data_set()), examples=None, seed=0, batch=4)
