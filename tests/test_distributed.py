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

ROOT = Path(__file__).parent.parent


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def job(folder: Path, name: str, processes: int, accumulate: int = 1, torchrun: bool = False) -> list[dict[str, Any]]:
    script = [str(ROOT / "tests" / "distributed_job.py"), str(folder / name), str(processes), str(accumulate)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run(sys.executable, *(launcher if torchrun else []), *script, folder=folder)
    return [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return job(tmp_path_factory.mktemp("alone"), "one", 1)[0]


def assert_same(states: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for state in states:
        assert all(torch.equal(mask, alone["masks"][name]) for name, mask in state["masks"].items())
        torch.testing.assert_close(state["quotas"], alone["quotas"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["scores"], alone["scores"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(state["model"], alone["model"], rtol=1e-5, atol=1e-6)
    for state in states[1:]:  # ranks agree with each other to the bit
        assert all(torch.equal(a, b) for a, b in zip(state["scores"], states[0]["scores"], strict=True))
        assert torch.equal(state["quotas"], states[0]["quotas"])


@pytest.mark.parametrize("torchrun", [False, True], ids=["own launcher", "torchrun"])
def test_two_processes_equal_one(tmp_path: Path, alone: dict[str, Any], torchrun: bool) -> None:
    assert_same(job(tmp_path, "two", 2, torchrun=torchrun), alone)


def test_gradient_accumulation_changes_nothing_but_rounding(tmp_path: Path, alone: dict[str, Any]) -> None:
    assert_same(job(tmp_path, "parts", 1, accumulate=4), alone)
    assert_same(job(tmp_path, "both", 2, accumulate=2), alone)


def test_the_command_runs_on_two_processes(tmp_path: Path) -> None:
    tiny = ["stages.0.epochs=1", "stages.1.epochs=1", "stages.2.epochs=1", "objective.steps=1", "model.width=4"]
    changes = [word for change in tiny for word in ("--set", change)]
    command = [sys.executable, "-m", "harp", "run", "digits/harp-99", "--out", "runs", *changes]
    run(*command, "--accelerator", "cpu", "--devices", "2", "--set", "stages.1.pruner.keep=5%", folder=tmp_path)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    layers = json.loads(summary.read_text())["layers"]
    size, kept = sum(layer["size"] for layer in layers), sum(layer["kept"] for layer in layers)
    assert kept == round(0.05 * size)
