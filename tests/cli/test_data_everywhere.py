"""Every command that takes data, with every way to give it, and runs that are used from another working directory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from harp.models import build
from harp.models.weights import save_model
from support import data_files
from support.commands import FINISHED, Harp

MODEL = """
from torch import nn

def make(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, num_classes)
    )
"""
SIDE = 32  # the only size that the model takes


def paint_classes(folder: Path, images: int, shade: int = 0) -> None:
    for name, colour in (("cat", (200, 30, 30)), ("dog", (30, 30, 200))):
        for number in range(images):
            data_files.paint(folder / name / f"{number}.png", 12, 10, (*colour[:2], colour[2] + number + shade))


def class_folders(root: Path) -> list[str]:
    paint_classes(root / "pets", 10)
    return ["--data", "pets"]


def parts(root: Path) -> list[str]:
    paint_classes(root / "split/train", 8)
    paint_classes(root / "split/val", 3, shade=20)
    return ["--data", "split"]


def arrays(root: Path) -> list[str]:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (24, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(
        root / "mine.npz",
        train_images=images[:16],
        train_labels=np.arange(16) % 2,
        test_images=images[16:],
        test_labels=np.arange(8) % 2,
    )
    return ["--data", "mine.npz"]


def named(root: Path) -> list[str]:
    folder = root / "published/cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / name).write_bytes(data_files.cifar())
    return ["--data", "cifar10", "--data-dir", "published"]


def saved(root: Path) -> list[str]:
    data_files.save_to_disk(root / "hub", [data_files.png(12, 10, (20 * n, 10, 10)) for n in range(20)], ["cat", "dog"])
    return ["--data", "hub"]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "class folders": class_folders,
    "parts": parts,
    "npz": arrays,
    "named": named,
    "hugging face": saved,
}
COMMANDS = {
    "doctor": ["doctor", "net.py:make", "--no-channels", "--json"],
    "plan": ["plan", "net.py:make", "--keep", "50%", "--json"],
    "bench": ["bench", "net.py:make", "--repeats", "1", "--batch", "1", "--json"],
    "slim": ["slim", "net.py:make", "--out", "small", "--keep", "50%", "--json"],
    "evaluate": ["evaluate", "net.py:make", "--weights", "w.safetensors", "--attack", "fgsm", "--no-checks", "--json"],
    "export": ["export", "net.py:make", "--weights", "w.safetensors", "--to", "sparse", "--check", "--json"],
}
PRUNE = ["prune", "net.py:make", "--keep", "50%", "--method", "magnitude", "--pretrain", "0", "--prune", "0"]
SHORT = ["--finetune", "1", "--set", "data.holdout=2", "--set", "evaluate.attacks=[fgsm]", "--set", "objective.steps=1"]


def model_file(classes: int = 2) -> None:
    Path("net.py").write_text(MODEL)
    save_model("w.safetensors", build("net.py:make", num_classes=classes, shape=(3, SIDE, SIDE)))


def prune(harp: Harp, *words: str) -> Path:
    code, _, err = harp(*PRUNE, *SHORT, "--weights", "w.safetensors", *words)
    assert code in FINISHED, err
    (run,) = Path("runs").glob("magnitude-*")
    return run.absolute()


def crossed() -> list[object]:
    """Every command with every kind of data; those that start processes of their own quickly for one kind only."""
    slow = {(command, kind) for command in ("bench", "export") for kind in list(KINDS)[1:]}
    pairs = [(command, kind) for command in COMMANDS for kind in KINDS]
    return [pytest.param(*pair, marks=[pytest.mark.slow] * (pair in slow)) for pair in pairs]


@pytest.mark.parametrize(("command", "kind"), crossed())
def test_every_command_takes_all_data(command: str, kind: str, harp: Harp, tmp_path: Path) -> None:
    words = KINDS[kind](tmp_path)
    model_file(10 if kind == "named" else 2)
    code, out, err = harp(*COMMANDS[command], *words)
    assert code in (0, 1), err  # 1: the doctor finds something bad in a network that is not trained
    assert json.loads(out)
    assert ("no test images of its own" in err) == (kind in ("class folders", "hugging face"))
    assert ("images of 32x32 pixels" in err) == (kind not in ("npz", "named"))


@pytest.mark.parametrize(
    "kind", ["class folders", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:])]
)
def test_a_run_is_used_from_another_folder(
    kind: str, harp: Harp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = KINDS[kind](tmp_path)
    model_file(10 if kind == "named" else 2)
    run = prune(harp, *words)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def works(*command: str) -> str:
        code, out, err = harp(*command)
        assert code == 0, err
        return out

    works("evaluate", str(run), "--attack", "fgsm", "--no-checks")
    works("export", str(run), "--to", "sparse", "--to", "safetensors", "--check")
    works("evaluate", str(run / "export/network.harp"), "--attack", "fgsm", "--no-checks")
    works("report", str(run))
    works("slim", str(run), "--out", "small")
    works("bench", str(run), "--repeats", "1", "--batch", "1")
    shared = [
        run / "MODEL_CARD.md",
        run / "export/manifest.json",
        run / "export/network.harp",
        *elsewhere.glob("report.*"),
    ]
    assert len(shared) == 6 and not any(str(tmp_path).encode() in file.read_bytes() for file in shared)
    names = json.loads((run / "export/manifest.json").read_text())["classes"]
    assert names == ["cat", "dog"] or kind in ("npz", "named")


def test_the_drawn_test_images_are_those_of_the_run(harp: Harp, tmp_path: Path) -> None:
    words = class_folders(tmp_path)
    model_file()
    run = prune(harp, *words)
    (again,) = {prune(harp, "--data", "pets"), run}  # the same images, the same identity
    assert json.loads((again / "summary.json").read_text())["data"]["drawn"]
    data_files.paint(tmp_path / "pets/cat/new.png", 12, 10)
    code, _, err = harp("evaluate", str(run), "--attack", "fgsm")
    assert code == 2 and "its data has changed, and with it the test images" in err and err.count("\n") <= 2


@pytest.mark.parametrize("kind", ["class folders", "npz", "named"])
def test_data_that_was_moved_is_asked_for(kind: str, harp: Harp, tmp_path: Path) -> None:
    words = KINDS[kind](tmp_path)
    model_file(10 if kind == "named" else 2)
    run = prune(harp, *words)
    place = tmp_path / words[-1]
    (tmp_path / "new").mkdir()
    moved = shutil.move(place, tmp_path / "new" / place.name)
    code, _, err = harp("evaluate", str(run), "--attack", "fgsm", "--no-checks")
    assert code == 2 and f"the data was at {place} and is not there any more: give --data-dir" in err
    for folder in {str(moved), str(tmp_path / "new")}:
        code, _, err = harp("evaluate", str(run), "--attack", "fgsm", "--no-checks", "--data-dir", folder)
        assert code == 0, err


def test_a_model_file_that_was_moved_is_missed(harp: Harp, tmp_path: Path) -> None:
    words = arrays(tmp_path)
    model_file()
    run = prune(harp, *words)
    Path("net.py").rename("other.py")
    code, _, err = harp("evaluate", str(run), "--attack", "fgsm")
    assert code == 2 and f"the model was at {tmp_path / 'net.py'} and is not there any more" in err


def test_other_data_has_the_size_of_the_run(harp: Harp, tmp_path: Path) -> None:
    words = arrays(tmp_path)
    model_file()
    run = prune(harp, *words)
    class_folders(tmp_path)
    code, out, err = harp("evaluate", str(run), "--data", "pets", "--attack", "fgsm", "--no-checks", "--json")
    assert code == 0 and json.loads(out)["results"][0]["n"] == 4, err


def test_an_unknown_size_is_asked_for(harp: Harp, tmp_path: Path) -> None:
    words = class_folders(tmp_path)
    Path("any.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    for command in (["doctor", "any.py:make"], ["prune", "any.py:make", "--keep", "50%"], ["evaluate", "any.py:make"]):
        code, _, err = harp(*command, *words)
        assert code == 2 and err.count("\n") == 1
        assert "which size should the images of pets have?" in err and "add --size, like --size 10" in err
    code, out, err = harp("doctor", "any.py:make", *words, "--size", "16", "--no-channels", "--json")
    assert code in (0, 1) and json.loads(out), err


def test_a_normalisation_goes_in_front_of_the_model(harp: Harp, tmp_path: Path) -> None:
    words = arrays(tmp_path)
    model_file()
    net = build("net.py:make", num_classes=2, shape=(3, SIDE, SIDE))
    behind = nn.Sequential(nn.BatchNorm2d(3, affine=False), net)
    behind[0] = nn.Identity()
    save_model("behind.safetensors", behind)
    for weights, said in (("w.safetensors", ""), ("behind.safetensors", "without the prefix '1.'")):
        code, _, err = harp(
            "evaluate", "net.py:make", *words, "--weights", weights, "--normalize", "cifar10", "--attack", "fgsm"
        )
        assert code == 0 and said in err, err
    run = prune(harp, *words, "--normalize", "0.5/0.25")
    assert "normalize" in (run / "recipe.yaml").read_text()
    assert harp("evaluate", str(run), "--normalize", "0.5/0.25")[0] == 2
    for wrong in ("0.5", "0.5/0", "cifar", "120/60"):
        code, _, err = harp("doctor", "net.py:make", "--normalize", wrong)
        assert code == 2 and "normalisation" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "message"), [(["--data", "nothing/here"], "no such folder"), (["--data", "net.py"], "is a file")]
)
def test_data_that_is_not_there_is_one_line(option: list[str], message: str, harp: Harp) -> None:
    model_file()
    for command in (["doctor", "net.py:make"], ["evaluate", "net.py:make"], ["prune", "net.py:make", "--keep", "50%"]):
        code, _, err = harp(*command, *option)
        assert code == 2 and message in err and err.count("\n") == 1, err
