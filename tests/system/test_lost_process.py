"""A process that dies ends the run on all processes, with one message; any number of processes can resume it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harp.errors import LOST, UNFINISHED
from support.processes import numbers, recipe, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def command(folder: Path, processes: int, *words: str) -> list[str]:
    more = "--accelerator", "cpu", "--devices", str(processes), "--set", "stages.pretrain.epochs=8", *words
    return [sys.executable, "-m", "harp", "run", str(recipe(folder)), "--out", str(folder / "runs"), *more]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The results of an uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("straight")
    run(*command(folder, 1), folder=folder)
    return numbers(folder / "runs")


def ranks(parent: int) -> dict[int, int]:
    """The process ids that a command has started, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                variables = dict(part.split("=", 1) for part in (entry / "environ").read_text().split("\0") if part)
                found[int(variables["RANK"])] = int(entry.name)
        except (OSError, KeyError):
            continue
    return found


def broken_off(folder: Path, processes: int, victim: int | None, number: int, stage: str) -> tuple[int, str, float]:
    """Send a signal to one of the processes, or to the command, once a stage has a state; how the command ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command(folder, processes, "--minutes", "0.001")
    process = subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    while not list(folder.glob(f"runs/stages/*-{stage}/state.pt")):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.02)
    started = ranks(process.pid)
    assert sorted(started) == list(range(processes))
    began = time.monotonic()
    os.kill(process.pid if victim is None else started[victim], number)
    _, err = process.communicate(timeout=300)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started.values()), "nothing is left running"
    return process.returncode, err, time.monotonic() - began


@pytest.mark.parametrize(("processes", "victim", "after"), [(2, 1, 4), (2, 0, 1), (4, 2, 2)])
def test_a_killed_process_ends_the_run_which_can_be_resumed(
    tmp_path: Path, straight: tuple[Any, ...], processes: int, victim: int, after: int
) -> None:
    stage = "pretrain" if victim else "prune"
    code, err, seconds = broken_off(tmp_path, processes, victim, signal.SIGKILL, stage)
    assert code == LOST, err
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith(f"error: process {victim} of {processes} was ended by SIGKILL")
    assert "go on with the same command: harp run" in line and "Traceback" not in err
    assert seconds < 60
    run(*command(tmp_path, after), folder=tmp_path)
    assert numbers(tmp_path / "runs") == straight


@pytest.mark.parametrize(
    ("victim", "number", "expected"),
    [(1, signal.SIGTERM, UNFINISHED), (0, signal.SIGUSR1, UNFINISHED), (None, signal.SIGINT, 128 + signal.SIGINT)],
)
def test_a_signal_to_any_process_stops_all(
    tmp_path: Path, straight: tuple[Any, ...], victim: int | None, number: int, expected: int
) -> None:
    code, err, _ = broken_off(tmp_path, 2, victim, number, "pretrain")
    assert code == expected, err
    assert err.count("Go on with the same command") == 1 and "error" not in err
    run(*command(tmp_path, 1), folder=tmp_path)
    assert numbers(tmp_path / "runs") == straight
