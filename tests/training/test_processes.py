"""The loop in several processes: they start from one state, stay together, and notice if they do not."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.paths import SUPPORT
from support.processes import run


def job(folder: Path, processes: int) -> list[dict[str, Any]]:
    run(sys.executable, str(SUPPORT / "training_job.py"), str(folder / "out"), str(processes), folder=folder)
    return [torch.load(folder / f"out.{rank}", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return job(tmp_path_factory.mktemp("pair"), 2)


@pytest.mark.parametrize("method", ["magnitude", "mad"])
def test_all_processes_end_with_the_same_bits(pair: list[dict[str, Any]], method: str) -> None:
    """Although their models differ at the start. MAD's measurements are averaged over the processes."""
    first, second = (results[method] for results in pair)
    assert first["losses"] == second["losses"]
    for part in ("model", "pruner"):
        for name, value in first[part].items():
            other = second[part][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_two_processes_train_as_one_does(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    (alone,) = job(tmp_path, 1)
    assert pair[0]["magnitude"]["losses"] == pytest.approx(alone["magnitude"]["losses"], rel=1e-4)
    for name, value in alone["magnitude"]["model"].items():
        torch.testing.assert_close(pair[0]["magnitude"]["model"][name], value, rtol=1e-3, atol=1e-5)


def test_processes_whose_masks_differ_stop(pair: list[dict[str, Any]]) -> None:
    for results in pair:
        assert results["differing"].startswith("after epoch 1 process 1 holds other weights or masks than process 0")
