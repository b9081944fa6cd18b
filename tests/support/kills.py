"""Kill a run of several processes again and again at random moments, and compare its end with that of one left alone.

    PYTHONPATH=tests python -m support.kills [--kills 20] [--devices 2] [--seed 0] [FOLDER]

Killed (SIGKILL) are the first process, another one, the one that started them, or all together: before they have begun,
in a step, while a state is written, while a stage ends. After each kill every file must be readable, no process may be
left, and the training may not have gone back further than to its last state. The last line is one JSON object.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml

from harp.system.tensors import load_state
from support.commands import FINISHED, RECIPE
from support.survival import artefact, assert_equal, assert_whole, finish

STAGES = [
    {"name": "pretrain", "pruner": "dense", "epochs": 2},
    {"name": "prune", "pruner": {"name": "harp", "keep": "5%"}, "epochs": 6},
    {"name": "finetune", "pruner": "fixed", "epochs": 18, "optimizer": {"lr": 0.01}},
]
VICTIMS = ("first", "another", "starter", "all")
Place = tuple[int, int, int]  # stages done, epoch, step


def command(folder: Path, devices: int) -> list[str]:
    content = {**RECIPE, "stages": STAGES, "data": {**RECIPE["data"], "batch": 128}}  # type: ignore[dict-item]
    (folder / "r.yaml").write_text(yaml.safe_dump(content))
    words = ["run", str(folder / "r.yaml"), "--out", str(folder / "runs"), "--devices", str(devices)]
    return [sys.executable, "-m", "harp", *words, "--accelerator", "cpu", "--minutes", "0"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def place(folder: Path) -> Place:
    """How far the run has come, by its files."""
    stages = folder / "runs" / "stages"
    done = len(list(stages.glob("*/stage.json")))
    found = [(0, 0)]
    for path in stages.glob("*/state.pt"):
        if not (path.parent / "stage.json").exists():
            state = load_state(path)
            found.append((state["epoch"], state["step"]))
    return (done, *max(found))


def written(folder: Path) -> int:
    """When a state was written last."""
    times = [0]
    for path in (folder / "runs").glob("stages/*/state.pt"):
        try:
            times.append(path.stat().st_mtime_ns)
        except FileNotFoundError:
            continue
    return max(times)


def children(pid: int) -> list[int]:
    """The processes that a process has started, in their order."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def left(ours: list[int]) -> list[int]:
    """Which of the processes still run."""
    found = []
    for pid in ours:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
                found.append(pid)
        except OSError:
            continue
    return found


def strike(process: subprocess.Popen[bytes], victim: str, draw: random.Random) -> list[int]:
    """Kill; return all the processes that there were."""
    ranks = children(process.pid)
    chosen = {
        "first": ranks[:1],
        "another": draw.choices(ranks[1:]) if ranks[1:] else [],
        "starter": [process.pid],
        "all": [process.pid, *ranks],
    }[victim]
    for pid in chosen or [process.pid]:  # it may not have started any yet
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [process.pid, *ranks]


def kill_once(folder: Path, devices: int, draw: random.Random, patience: float) -> dict[str, Any] | None:
    """Start the run, kill something at a random moment and wait for the rest to end; None if it was finished before."""
    began, before = time.monotonic(), written(folder)
    victim, early = draw.choice(VICTIMS), draw.random() < 0.15
    # By states and not by seconds, so that a fast machine does not come to the end before the last kill: there is one a
    # step, 286 in all. Early ones come before the first.
    writes, moment = 0 if early else draw.randint(1, 12), draw.uniform(0, 0.05)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command(folder, devices), env=environment(), stdout=log, stderr=log)
    until, seen = began + (draw.uniform(0, 8) if early else 300), 0
    while time.monotonic() < until and process.poll() is None and seen < max(1, writes):
        time.sleep(0.002)
        newest = written(folder)
        seen, before = seen + (newest != before), newest
    assert early or seen or process.poll() is not None, f"nothing was written in 300 s: {(folder / 'log').read_text()}"
    time.sleep(moment)
    if process.poll() is not None:
        assert process.returncode in FINISHED, (folder / "log").read_text()[-2000:]
        return None
    ours, struck = strike(process, victim, draw), time.monotonic()
    code = process.wait(timeout=patience)
    while left(ours):
        assert time.monotonic() - struck < patience, f"{victim} was killed, and {left(ours)} of {ours} still run"
        time.sleep(0.01)
    assert code != 0
    told = {"victim": victim, "early": early, "code": code, "writes": seen}
    return {**told, "others ended": round(time.monotonic() - struck, 2)}


def torture(folder: Path, kills: int, devices: int = 2, seed: int = 0, patience: float = 90.0) -> dict[str, Any]:
    """Do it all; return the facts."""
    draw, began = random.Random(seed), time.monotonic()
    straight, killed, runs = folder / "straight", folder / "killed-1", 1
    for each in (straight, killed):
        each.mkdir(parents=True)
    finish(command(straight, devices), 600, environment())
    alone = time.monotonic() - began
    print(f"left alone: {alone:.0f} s", flush=True)
    facts: list[dict[str, Any]] = []
    last: Place = (0, 0, 0)
    while len(facts) < kills:
        found = kill_once(killed, devices, draw, patience)
        if found is None:  # who is left alone goes on for a moment: on a fast machine to the end
            _compare(killed, straight)
            runs, last = runs + 1, (0, 0, 0)
            killed = folder / f"killed-{runs}"
            killed.mkdir()
            continue
        assert_whole(killed / "runs")
        here = place(killed)
        assert here >= last, f"it went back from {last} to {here}"
        last = here
        facts.append({**found, "place": here})
        print(f"kill {len(facts)}/{kills}: {facts[-1]}", flush=True)
    finish(command(killed, devices), 600, environment())
    _compare(killed, straight)
    return {
        "kills": kills,
        "runs": runs,
        "devices": devices,
        "seed": seed,
        "torch": torch.__version__,
        "seconds left alone": round(alone, 1),
        "seconds in all": round(time.monotonic() - began, 1),
        "others ended after at most": max(fact["others ended"] for fact in facts),
        "victims": Counter(fact["victim"] for fact in facts),
        "exit codes": Counter(str(fact["code"]) for fact in facts),
        "same bits": True,
    }


def _compare(killed: Path, straight: Path) -> None:
    """The end is the same to the bit, and nothing else is left."""
    assert_equal(artefact(killed), artefact(straight))
    (one,), (other,) = ((each / "runs").glob("tiny-*/summary.json") for each in (straight, killed))
    mine, theirs = json.loads(one.read_text()), json.loads(other.read_text())
    assert [row["value"] for row in mine["results"]] == [row["value"] for row in theirs["results"]]
    rest = [
        path for path in (killed / "runs").rglob("*") if path.name.startswith(("state", ".")) or path.suffix == ".lock"
    ]
    assert not rest, f"left behind: {rest}"
    assert_whole(killed / "runs")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="for the runs; default: one that is removed")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    if words.folder is not None:
        facts = torture(words.folder, words.kills, words.devices, words.seed)
    else:
        with tempfile.TemporaryDirectory() as folder:
            facts = torture(Path(folder), words.kills, words.devices, words.seed)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
