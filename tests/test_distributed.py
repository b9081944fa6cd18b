"""Several processes on CPU (gloo) do what one does, by the engine's own launcher and by torchrun."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harp import masks as mask_ops
from tests.distributed_job import METHODS

ROOT = Path(__file__).parent.parent

# What two processes find with these is not what one finds.
APART = {
    "anp-vs": "every process draws its examples' masks for itself",
    "mad": "every process finds the soft masks of its own part of the batch, and saliencies are averaged",
}

States = dict[str, dict[str, Any]]


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def job(folder: Path, processes: int, *methods: str, accumulate: int = 1, torchrun: bool = False) -> list[States]:
    """The states that each process ends with; without names those of all methods."""
    script = [str(ROOT / "tests" / "distributed_job.py"), str(folder / "out"), str(processes), str(accumulate)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run(sys.executable, *(launcher if torchrun else []), *script, *methods, folder=folder)
    return [torch.load(folder / f"out.{rank}", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> States:
    return job(tmp_path_factory.mktemp("alone"), 1)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[States]:
    return job(tmp_path_factory.mktemp("pair"), 2)


def assert_same(state: Any, other: Any, **tolerance: float) -> None:
    """Every tensor and every number of two states is the same, up to the tolerance."""
    if isinstance(state, dict):
        assert list(state) == list(other)
        for key, value in state.items():
            assert_same(value, other[key], **tolerance)
    elif isinstance(state, torch.Tensor):
        torch.testing.assert_close(state, other, **tolerance)
    else:
        assert state == (pytest.approx(other, rel=tolerance["rtol"]) if isinstance(state, float) else other)


BITS = {"rtol": 0.0, "atol": 0.0}
ROUNDING = {"rtol": 1e-7, "atol": 1e-9}


@pytest.mark.parametrize("method", METHODS)
def test_processes_agree_to_the_bit_and_meet_the_budget(pair: list[States], alone: States, method: str) -> None:
    first, second = (states[method] for states in pair)
    assert_same(first, second, **BITS)
    assert mask_ops.kept(first["masks"]) == first["total"] == alone[method]["total"]
    live = {name: weight != 0 for name, weight in first["model"].items() if name in first["masks"]}
    assert all(not (live[name] & ~mask).any() for name, mask in first["masks"].items())


@pytest.mark.parametrize("method", [method for method in METHODS if method not in APART])
def test_two_processes_equal_one(pair: list[States], alone: States, method: str) -> None:
    assert_same(pair[0][method], alone[method], **ROUNDING)


def test_torchrun_is_as_good_a_launcher(tmp_path: Path, alone: States) -> None:
    for states in job(tmp_path, 2, "harp", torchrun=True):
        assert_same(states["harp"], alone["harp"], **ROUNDING)


def test_gradient_accumulation_changes_nothing_but_rounding(tmp_path: Path, alone: States) -> None:
    for processes, accumulate in ((1, 4), (2, 2)):
        for states in job(tmp_path, processes, "harp", accumulate=accumulate):
            assert_same(states["harp"], alone["harp"], **ROUNDING)


def test_the_command_runs_on_two_processes(tmp_path: Path) -> None:
    tiny = ["stages.0.epochs=1", "stages.1.epochs=1", "stages.2.epochs=1", "objective.steps=1", "model.width=4"]
    changes = [word for change in tiny for word in ("--set", change)]
    command = [sys.executable, "-m", "harp", "run", "digits/harp-99", "--out", "runs", *changes]
    run(*command, "--accelerator", "cpu", "--devices", "2", "--set", "stages.1.pruner.keep=5%", folder=tmp_path)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    layers = json.loads(summary.read_text())["layers"]
    size, kept = sum(layer["size"] for layer in layers), sum(layer["kept"] for layer in layers)
    assert kept == round(0.05 * size)
