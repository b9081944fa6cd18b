"""Several processes on the CPU (gloo) give the same result as one, with our launcher and with torchrun.

The networks have batch norms, the attacks start at random, and everything is computed in float64, so that the order of
a sum does not decide between two weights: only rounding errors remain.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harp.errors import AT_CHANCE
from harp.pruning import masks as mask_ops
from support.distributed_job import METHODS
from support.paths import ROOT, SUPPORT
from support.processes import numbers, recipe, run

# Methods whose result depends on the number of processes.
APART = {"mad": "every process computes soft masks from its part of the batch, and saliencies are averaged"}
MAIN = ("harp", "hydra", "r-admm", "bcs-p")
OBJECTIVES = ("harp/trades", "harp/fast")
OWN_NORMS = "harp/trades/apart"  # each process normalises by its own images
ALL = (*METHODS, *OBJECTIVES, OWN_NORMS)

States = dict[str, dict[str, Any]]


def job(
    folder: Path,
    processes: int,
    *methods: str,
    accumulate: int = 1,
    stop_at: int = 0,
    torchrun: bool = False,
) -> list[States]:
    """The states that each process ends with."""
    words = str(folder / "out"), str(processes), str(accumulate), str(stop_at)
    script = [str(SUPPORT / "distributed_job.py"), *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run(sys.executable, *(launcher if torchrun else []), *script, *methods, folder=folder)
    return [torch.load(folder / f"out.{rank}", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> States:
    return job(tmp_path_factory.mktemp("alone"), 1, *ALL)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[States]:
    return job(tmp_path_factory.mktemp("pair"), 2, *ALL)


def assert_same(state: Any, other: Any, **tolerance: float) -> None:
    """Every tensor and every number of two states is the same, up to the tolerance."""
    if isinstance(state, dict):
        assert list(state) == list(other)
        for key, value in state.items():
            assert_same(value, other[key], **tolerance)
    elif isinstance(state, list | tuple):
        for mine, theirs in zip(state, other, strict=True):
            assert_same(mine, theirs, **tolerance)
    elif isinstance(state, torch.Tensor):
        torch.testing.assert_close(state, other, **tolerance)
    else:
        assert state == (pytest.approx(other, rel=tolerance["rtol"]) if isinstance(state, float) else other)


BITS = {"rtol": 0.0, "atol": 0.0}
ROUNDING = {"rtol": 1e-7, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-6}  # of a method whose gates are float32


@pytest.mark.parametrize("method", ALL)
def test_all_processes_have_the_same_bits_and_meet_the_budget(pair: list[States], alone: States, method: str) -> None:
    first, second = (states[method] for states in pair)
    assert_same(first, second, **BITS)
    assert mask_ops.kept(first["masks"]) == first["total"] == alone[method]["total"]
    live = {name: weight != 0 for name, weight in first["model"].items() if name in first["masks"]}
    assert all(not (live[name] & ~mask).any() for name, mask in first["masks"].items())


@pytest.mark.parametrize("method", [method for method in ALL if method not in (*APART, OWN_NORMS)])
def test_two_processes_equal_one(pair: list[States], alone: States, method: str) -> None:
    assert_same(pair[0][method], alone[method], **(SINGLE if method == "anp-vs" else ROUNDING))


def test_without_synchronisation_batch_norms_use_the_images_of_their_process(pair: list[States], alone: States) -> None:
    assert not torch.allclose(
        pair[0][OWN_NORMS]["model"]["2.running_mean"], alone[OWN_NORMS]["model"]["2.running_mean"]
    )
    assert_same(alone[OWN_NORMS], alone["harp/trades"], **BITS)


@pytest.mark.slow
def test_torchrun_gives_the_same_result_as_our_launcher(tmp_path: Path, alone: States) -> None:
    for states in job(tmp_path, 2, "harp", torchrun=True):
        assert_same(states["harp"], alone["harp"], **ROUNDING)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("objective", ["natural", "pgd", "free", "trades", "fast"])
def test_nothing_depends_on_the_number_of_processes(tmp_path: Path, objective: str, accumulate: int) -> None:
    words = [f"{method}/{objective}" for method in MAIN]
    (expected,) = job(tmp_path, 1, *words, accumulate=accumulate)
    for processes in (2, 4):
        for states in job(tmp_path, processes, *words, accumulate=accumulate):
            assert_same(states, expected, **ROUNDING)


def test_a_state_is_resumed_with_another_number_of_processes(tmp_path: Path, alone: States) -> None:
    """From the middle of an epoch."""
    assert all(states == {} for states in job(tmp_path, 2, "harp", stop_at=2)), "it should have stopped"
    (states,) = job(tmp_path, 1, "harp")
    assert_same(states["harp"], alone["harp"], **ROUNDING)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("objective", ["pgd", "free"])
def test_states_are_resumed_from_any_number_of_processes_to_any_other(tmp_path: Path, objective: str) -> None:
    words = [f"{method}/{objective}" for method in MAIN]
    (tmp_path / "alone").mkdir()
    (expected,) = job(tmp_path / "alone", 1, *words)
    for before, after in ((1, 4), (4, 1), (2, 4), (4, 2), (1, 2)):
        folder = tmp_path / f"{before}-{after}"
        folder.mkdir()
        assert job(folder, before, *words, stop_at=3)[0] == {}
        for states in job(folder, after, *words):
            assert_same(states, expected, **ROUNDING)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_gives_the_same_numbers_with_one_two_and_four_processes(tmp_path: Path) -> None:
    found = []
    for processes in (1, 2, 4):
        out = tmp_path / str(processes)
        words = "--out", str(out), "--accelerator", "cpu", "--devices", str(processes)
        run(sys.executable, "-m", "harp", "run", str(recipe(tmp_path)), *words, folder=tmp_path)
        found.append(numbers(out))
        assert not list(out.rglob("*state*")), "nothing is left over"
    assert found[0] == found[1] == found[2]
    assert any(row["value"] > 0.3 for row in found[0][1]), "it should have learned something"


def test_the_command_runs_on_two_processes(tmp_path: Path) -> None:
    tiny = ["stages.0.epochs=1", "stages.1.epochs=1", "stages.2.epochs=0", "objective.steps=1", "model.width=4"]
    changes = [word for change in tiny for word in ("--set", change)]
    command = [sys.executable, "-m", "harp", "run", "digits/harp-99", "--out", "runs", *changes]
    words = ["--accelerator", "cpu", "--devices", "2", "--set", "stages.1.pruner.keep=5%"]
    done = run(*command, *words, folder=tmp_path, code=AT_CHANCE)  # without fine-tuning it knows nothing
    assert done.stderr.splitlines()[-1].startswith("warning: ") and done.stderr.count("All files are kept") == 1
    (summary,) = tmp_path.glob("runs/*/summary.json")
    layers = json.loads(summary.read_text())["layers"]
    size, kept = sum(layer["size"] for layer in layers), sum(layer["kept"] for layer in layers)
    assert kept == round(0.05 * size)


@pytest.mark.slow
def test_an_error_is_printed_once(tmp_path: Path) -> None:
    words = "--accelerator", "cpu", "--devices", "2", "--data-dir", "nowhere"
    done = run(sys.executable, "-m", "harp", "run", "cifar10/resnet18/harp-pgd-99", *words, folder=tmp_path, code=2)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("error: ") and "nowhere" in errors[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("ip") is None or os.geteuid() != 0, reason="hosts are made by ip, as root")
@pytest.mark.parametrize("launcher", ["harp", "torchrun", "srun"])
def test_two_hosts_give_the_same_result_as_one_process(tmp_path: Path, launcher: str) -> None:
    done = run(sys.executable, str(ROOT / "scripts" / "two-hosts"), launcher, folder=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1])["equal"] is True


ENDING = """
import atexit, os
import torch.distributed as dist
atexit.register(lambda: os.write(1, f"process group: {dist.is_initialized()}\\n".encode()))  # runs last
from harp.system.distributed.fabric import launch
launch("32-true", "cpu", 2)
dist.barrier()
"""


def test_the_process_group_ends_before_python_shuts_down(tmp_path: Path) -> None:
    """Else Python aborts if a thread of the group frees a tensor meanwhile."""
    done = run(sys.executable, "-c", ENDING, folder=tmp_path)
    assert done.stdout == "process group: False\n" * 3  # two processes and the launcher
