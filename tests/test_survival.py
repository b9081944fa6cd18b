"""Nothing is lost: Ctrl-C, SIGTERM and kill -9 at any moment, and the end is the same to the bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from harp import checkpoint
from tests.test_cli import RECIPE

STAGES = [
    {"name": "pretrain", "pruner": "dense", "epochs": 2},
    {"name": "prune", "pruner": {"name": "harp", "keep": "5%"}, "epochs": 3},
    {"name": "finetune", "pruner": "fixed", "epochs": 2, "optimizer": {"lr": 0.01}},
]


def command(folder: Path, *words: str) -> list[str]:
    (folder / "r.yaml").write_text(yaml.safe_dump({**RECIPE, "stages": STAGES}))
    # --minutes 0 saves the state at every step, so that a kill can hit every moment of a save
    return [sys.executable, "-m", "harp", "run", str(folder / "r.yaml"), "--out", str(folder / "runs"), *words]


def artefact(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = (folder / "runs").glob("tiny-*/model.safetensors")
    return checkpoint.load_tensors(path)[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The artefact of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    subprocess.run(command(folder), check=True, capture_output=True, timeout=120)
    return artefact(folder)


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str], seconds: float = 90) -> None:
    """Wait until the run has come so far, or is over."""
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)) and process.poll() is None:
        assert time.monotonic() < end, f"{pattern} never came"
        time.sleep(0.005)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("number", "stage"), [(signal.SIGINT, "pretrain"), (signal.SIGTERM, "prune")])
def test_asked_to_stop_it_saves_says_how_to_go_on_and_goes_on(
    tmp_path: Path, straight: dict[str, torch.Tensor], number: signal.Signals, stage: str
) -> None:
    process = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path, f"runs/stages/*-{stage}/metrics.jsonl", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "the state is saved" in err or "all training is saved" in err
    assert "Go on with the same command: harp run" in err
    assert list(tmp_path.glob("runs/stages/*/state.pt")) or list(tmp_path.glob("runs/stages/*/stage.json"))
    subprocess.run(command(tmp_path), check=True, capture_output=True, timeout=120)
    assert_equal(artefact(tmp_path), straight)


def test_killed_again_and_again_it_ends_with_the_same_bits(tmp_path: Path, straight: dict[str, torch.Tensor]) -> None:
    delays = random.Random(0)
    for attempt in range(4):
        process = subprocess.Popen(command(tmp_path, "--minutes", "0"), stderr=subprocess.PIPE, text=True)
        wait_for(tmp_path, f"runs/stages/*-{['pretrain', 'prune', 'prune', 'finetune'][attempt]}/state.pt", process)
        time.sleep(delays.random() * 0.3)
        process.kill()
        process.communicate()
        for path in (tmp_path / "runs").rglob("*"):
            if path.name == "state.pt":
                assert checkpoint.load_state(path)["model"]
            elif path.suffix == ".safetensors" and not path.name.startswith("."):
                assert checkpoint.load_tensors(path)[0]
    subprocess.run(command(tmp_path), check=True, capture_output=True, timeout=120)
    assert_equal(artefact(tmp_path), straight)
    assert not list((tmp_path / "runs").rglob("state.pt"))
