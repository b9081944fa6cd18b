"""The folder that a reader of the documentation works in: the files that its examples name, small."""

import os
import pickle
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import harp
from harp.deploy.export import api
from support import finished_run, pictures
from support.documents import blocks

RUN = "mine-0123456789ab"
MODEL = {"name": "convnet", "width": 4}


def make(folder: Path) -> None:
    """Write all of it."""
    cifar(folder / "data" / "cifar-10-batches-py")
    corrupted(folder / "data" / "CIFAR-10-C")
    pictures.fill(folder / "pictures")
    np.savez(folder / "mine.npz", **arrays())
    for text in (*blocks("docs/tutorials/own-model.md", "python"), *blocks("docs/how-to/models.md", "python")):
        save_if_named(text, folder)
    torch.manual_seed(0)
    parent = harp.build_model("resnet18", num_classes=10, shape=(3, 32, 32))
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in parent.state_dict().items()}}, folder / "parent.pt"
    )
    own = harp.build_model(f"{folder / 'my_net.py'}:make", num_classes=10, shape=(3, 32, 32))
    harp.save_model(folder / "trained.safetensors", own)
    (recipe, *_) = (text for text in blocks("docs/reference/recipes.md", "yaml") if text.startswith("name: mine"))
    (folder / "mine.yaml").write_text(recipe, encoding="utf-8")
    own_method(folder)
    runs(folder / "runs")
    exported = folder / "runs" / RUN / "export"
    api.export(folder / "runs" / RUN, ["sparse", "onnx"], data_dir=folder / "data")
    for name in ("network.harp", "network.onnx"):
        shutil.copy(exported / name, folder)


def copy(source: Path, target: Path) -> None:
    """Another such folder; files are shared, as HARP replaces files and never changes them in place."""
    shutil.copytree(source, target, copy_function=os.link)


def save_if_named(text: str, folder: Path) -> bool:
    """Save a block of Python whose first line is `# path/to/file.py` under this name, as its reader does."""
    first, _, _ = text.partition("\n")
    name = first.removeprefix("# ")
    if not (first.startswith("# ") and name.endswith(".py") and " " not in name):
        return False
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return True


def arrays(size: int = 24) -> dict[str, Any]:
    """Random images of three classes, as for an .npz file."""
    rng = np.random.default_rng(0)
    images = {
        f"x_{part}": rng.integers(0, 256, (n, size, size), dtype=np.uint8) for part, n in (("train", 90), ("test", 30))
    }
    return images | {f"y_{part}": np.arange(n) % 3 for part, n in (("train", 90), ("test", 30))}


def cifar(folder: Path) -> None:
    """CIFAR-10 with twenty images a file."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        images = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        labels = [n % 10 for n in range(20)]
        (folder / name).write_bytes(pickle.dumps({b"data": images, b"labels": labels, b"batch_label": b""}, 2))


def corrupted(folder: Path) -> None:
    """CIFAR-10-C with twenty images a severity."""
    from harp.evaluation.corruptions import KINDS

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.save(folder / "labels.npy", np.arange(100) % 10)
    for kind in KINDS:
        np.save(folder / f"{kind}.npy", rng.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8))


def own_method(folder: Path) -> None:
    """The documented method, installed as pip leaves it."""
    (project,) = (tomllib.loads(text)["project"] for text in blocks("docs/how-to/add-a-method.md", "toml"))
    (folder / "my_methods.py").write_text(blocks("docs/how-to/add-a-method.md", "python")[0], encoding="utf-8")
    facts = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["harp.methods"].items()]
    (facts / "entry_points.txt").write_text("[harp.methods]\n" + "\n".join(lines) + "\n")


def runs(folder: Path) -> None:
    """Finished runs, of networks that nobody trained."""
    finished_run.make(folder / RUN, finished_run.content(model=MODEL, keep=0.3))
    demo = finished_run.content(data="fashion", model={"name": "tinynet", "width": 4}, keep=0.1)
    finished_run.make(folder / "demo-1f2e3d4c5b6a", demo)


def network() -> nn.Module:
    """A small network for 3x8x8 images of four classes."""
    from support import cases

    return cases.build("conv")
