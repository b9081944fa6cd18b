"""Small image files for tests."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest


def encoded(seed: int, width: int = 24, height: int = 18, kind: str = "JPEG") -> bytes:
    """A picture of smooth noise."""
    pillow = pytest.importorskip("PIL.Image")
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    pillow.fromarray(small).resize((width, height), pillow.Resampling.BICUBIC).save(buffer, kind)
    return buffer.getvalue()


def fill(root: Path, train: int = 30, test: int = 8, classes: int = 3) -> Path:
    """A folder of pictures of different sizes, train/<class>/ and test/<class>/."""
    for part, count in (("train", train), ("test", test)):
        for number in range(count):
            kind, ending = (("JPEG", "jpg"), ("PNG", "png"))[number % 2]
            path = root / part / f"class{number % classes}" / f"{number:03d}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(number + 1000 * (part == "test"), 16 + number % 9, 14 + number % 7, kind))
    return root


def tar(path: Path, members: dict[str, bytes]) -> Path:
    """An archive of members in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members))
    return path


def tar_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def damage(root: Path) -> list[str]:
    """Spoil five of thirty training images."""
    spoilt = {
        "train/class0/003.png": b"",
        "train/class1/004.jpg": b"<html>",
        "train/class1/007.png": encoded(7, kind="PNG")[:100],
        "train/class2/005.png": bytes(99),
        "train/class0/012.jpg": encoded(12)[:-200],
    }
    for name, data in spoilt.items():
        (root / name).write_bytes(data)
    return list(spoilt)
