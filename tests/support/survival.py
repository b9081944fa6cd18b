"""Runs that are killed and go on."""

import json
import subprocess
import time
from pathlib import Path

import torch

from harp.system.tensors import load_state, load_tensors
from support.commands import FINISHED


def finish(words: list[str], seconds: float = 300, env: dict[str, str] | None = None) -> None:
    """Run a command to its end."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=env)
    assert done.returncode in FINISHED, done.stderr


def artefact(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = (folder / "runs").glob("tiny-*/model.safetensors")
    return load_tensors(path)[0]


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str], seconds: float = 90) -> None:
    """Wait until the run has come so far, or is over."""
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)) and process.poll() is None:
        assert time.monotonic() < end, f"{pattern} never came"
        time.sleep(0.005)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_whole(folder: Path) -> None:
    """Every file that a process may have been writing can be read, and every epoch is logged once."""
    for path in folder.rglob("*"):
        if path.name.startswith("."):
            continue  # a temporary, which nobody reads
        if path.name in ("state.pt", "state.1.pt"):
            assert load_state(path)["model"]
        elif path.suffix == ".safetensors":
            assert load_tensors(path)[0]
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.name == "metrics.jsonl":
            epochs = [json.loads(line)["epoch"] for line in path.read_text().splitlines()]
            assert epochs == list(range(1, len(epochs) + 1))
