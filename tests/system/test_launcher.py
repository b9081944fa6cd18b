"""The launcher: all processes start, get signals once, and end, however one of them dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harp.errors import LOST
from harp.system.distributed import launcher
from harp.system.distributed.environment import Place
from support.paths import ROOT

# Runs the body in every process, with `rank`; the launcher prints how it ended.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {source!r})
from harp.system.distributed import environment, launcher
from harp.errors import Lost

launcher.FIRMLY, launcher.PATIENCE = {firmly}, {patience}
place = environment.here()
if place is None:
    try:
        sys.exit(launcher.supervise(3, nodes={nodes}, address={address!r}))
    except Lost as lost:
        print(lost)
        sys.exit({lost})
rank = place.rank
def tell(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # lines do not mix

tell("rank", rank, "of", place.world, "pid", os.getpid())
folder = Path({folder!r})
(folder / f"up.{{rank}}").touch()
while {together} and len(list(folder.glob("up.*"))) < 3: time.sleep(0.005)  # starting may take a while
{body}
"""
SOURCE = str(ROOT / "src")
HEARD = """
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
tell("ready")
while not heard: time.sleep(0.01)
(folder / f"heard.{rank}").touch()
while len(list(folder.glob("heard.*"))) < 3: time.sleep(0.005)
tell("heard", len(heard))
sys.exit(75)
"""


SOON = 0.2  # for tests in which the launcher must end the other processes
LONG = 300.0


def start(
    folder: Path,
    body: str,
    nodes: int = 1,
    address: str | None = None,
    *,
    together: bool = True,
    firmly: float = LONG,
    patience: float = LONG,
) -> subprocess.Popen[str]:
    script = folder / "script.py"
    facts = {"source": SOURCE, "lost": LOST, "folder": str(folder), "nodes": nodes, "address": address}
    text = SCRIPT.format(body=body, together=together, firmly=firmly, patience=patience, **facts)
    script.write_text(text)
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)


def pids(output: str) -> list[int]:
    return [int(line.split()[-1]) for line in output.splitlines() if line.startswith("rank")]


def gone(numbers: list[int], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in numbers) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(os.path.exists(f"/proc/{pid}") for pid in numbers)


def test_all_processes_run_and_the_exit_code_is_theirs(tmp_path: Path) -> None:
    process = start(tmp_path, "")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert sorted(line.split()[:4] for line in out.splitlines()) == [["rank", str(r), "of", "3"] for r in range(3)]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(999)", LOST, "process 1 of 3 was ended by SIGKILL"),
        ("os.kill(os.getpid(), 9) if rank == 0 else time.sleep(999)", LOST, "process 0 of 3 was ended by SIGKILL"),
        ("sys.exit(2) if rank == 2 else time.sleep(999)", 2, ""),
        ("sys.exit(75) if rank == 2 else time.sleep(999)", 75, ""),
        (f"sys.exit(2) if rank == 2 else sys.exit({LOST})", 2, ""),
        (f"sys.exit({LOST})", LOST, "not one of this machine's"),
        ("sys.exit(75 if rank == 0 else 0)", 75, ""),
    ],
)
def test_a_process_that_dies_ends_all_others(tmp_path: Path, body: str, code: int, words: str) -> None:
    process = start(tmp_path, body, firmly=SOON)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == code and words in out
    assert len(pids(out)) == 3 and gone(pids(out))


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    lines = ["import subprocess", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"]
    lines += ["child = subprocess.Popen(['sleep', '999'])", "tell('rank', child.pid)", "(folder / str(rank)).touch()"]
    lines += ["while rank == 0 and len(list(folder.glob('[012]'))) < 3: time.sleep(0.005)"]
    lines += ["sys.exit(1) if rank == 0 else time.sleep(999)"]
    process = start(tmp_path, "\n".join(lines), firmly=SOON, patience=SOON)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert len(pids(out)) == 6 and gone(pids(out))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_once(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, HEARD)
    assert process.stdout is not None
    ready = 0
    while ready < 3:
        ready += process.stdout.readline().startswith("ready")
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75
    assert out.splitlines().count("heard 1") == 3


def test_a_signal_while_processes_are_being_started_reaches_all(tmp_path: Path) -> None:
    """It is sent when the first process exists: neither that one nor the others may miss it.

    A process in which Python's own start-up swallows the Ctrl-C gets the launcher's SIGTERM, as outside of tests.
    """
    body = HEARD.replace('heard.*"))) < 3', 'heard.*"))) < 1')
    process = start(tmp_path, body, together=False, firmly=launcher.FIRMLY)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not listed.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode in (75, 128 + signal.SIGINT), out
    assert gone(pids(out))


def test_an_interrupt_during_the_start_of_python_counts_as_a_stop() -> None:
    """Python then exits with 1 before our code runs; without a Ctrl-C 1 is a failure."""
    places = [Place(local, 2, local, 2) for local in range(2)]
    assert launcher.exit_code({0: 75, 1: 1}, places, [signal.SIGINT]) in (75, 130)
    assert launcher.exit_code({0: 1, 1: 1}, places, [signal.SIGINT]) == 130
    assert launcher.exit_code({0: 75, 1: 1}, places, [signal.SIGTERM]) == 1


def test_a_process_without_signal_handlers_is_ended_by_the_signal(tmp_path: Path) -> None:
    process = start(tmp_path, "tell('ready'); time.sleep(999)")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(6)]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert gone(pids("".join(lines) + out))


def test_the_exit_code_is_that_of_the_error_if_the_others_stopped(tmp_path: Path) -> None:
    process = start(tmp_path, "sys.exit(2 if rank == 2 else 75)")
    process.communicate(timeout=120)
    assert process.returncode == 2


def test_several_machines_share_an_address(tmp_path: Path) -> None:
    body = "tell('at', place.address, place.port, place.world, place.nodes)"
    out, _ = start(tmp_path, body, nodes=2, address="10.0.0.7:1234").communicate(timeout=120)
    assert out.splitlines().count("at 10.0.0.7 1234 6 2") == 3
