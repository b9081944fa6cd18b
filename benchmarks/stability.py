"""Does HARP with default options meet its budget and stay above chance, from 50 % of the weights down to 0.1 %?

    python benchmarks/stability.py [--method harp] [--jobs 2] [--out runs/stability]

Three small networks, nine budgets, two seeds on the embedded Fashion-MNIST images. A cell is one network, budget and
seed: the method and HYDRA at LAMP's rates prune and fine-tune the same adversarially pre-trained network, under the
same training, and both are measured on the 1,000 test images. No option of the method is set but the budget.

A finished cell is a JSON file in the output folder and is not computed again; an interrupted one goes on from its last
state. The names of the files contain a hash of the pruning code, so a changed method is measured anew. The last line
of standard output is one JSON object; a table comes before it.
"""

import argparse
import hashlib
import inspect
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from benchmarks.terminal import Parser, positive, say

import harp
from harp.errors import UNFINISHED, HarpError, Interrupted
from harp.experiments import pool, study
from harp.experiments.recipe import Recipe, number, parse
from harp.experiments.run import Run
from harp.pruning import allocation, methods, rounding, units
from harp.system import files
from harp.system.interrupt import Stop
from harp.system.progress import Quiet, Terminal
from harp.training import loop as training

OWN = Path(__file__).resolve().with_name("networks.py")
NETWORKS: dict[str, tuple[dict[str, Any], float]] = {  # the model, and the learning rate of its first two trainings
    "plain": ({"name": "tinynet", "width": 12}, 0.1),
    "residual": ({"name": f"{OWN}:residual"}, 0.1),
    "unnormalised": ({"name": f"{OWN}:unnormalised"}, 0.02),
}
KEEP = ("50%", "20%", "10%", "5%", "2%", "1%", "0.5%", "0.25%", "0.1%")
RIVAL = "hydra+lamp"
ATTACK, EPSILON = "pgd-10", 0.1


@dataclass(frozen=True)
class Training:
    """How long the networks train: training images, and epochs of pre-training, pruning and fine-tuning."""

    images: int
    epochs: tuple[int, int, int]


FULL, SHORT = Training(3000, (10, 4, 3)), Training(2000, (6, 4, 2))


@dataclass(frozen=True)
class Cell:
    """One network, budget and seed, pruned by the method and by its rival."""

    method: str
    network: str
    keep: float
    seed: int
    training: Training

    @property
    def name(self) -> str:
        """What it is called in the output."""
        return f"{self.network}, keep {100 * self.keep:g} %, seed {self.seed}"

    def recipe(self, method: str) -> Recipe:
        """The run of a method, which shares its pre-training with all others of this network and seed."""
        model, lr = NETWORKS[self.network]
        pretrain, prune, finetune = self.training.epochs
        pruner = study.method(method).pruner(self.keep)
        stages = [
            {"name": "pretrain", "pruner": "dense", "epochs": pretrain, "optimizer": {"lr": lr}},
            {"name": "prune", "pruner": pruner, "epochs": prune, "optimizer": {"lr": lr}},
            {"name": "finetune", "pruner": "fixed", "epochs": finetune, "optimizer": {"lr": lr / 2}},
        ]
        content = {
            "name": f"{study.slug(method)}-{self.network}-{100 * self.keep:g}%-seed{self.seed}",
            "seed": self.seed,
            "data": {"name": "fashion", "batch": 64, "holdout": 500, "train": self.training.images, "pad": 2},
            "model": model,
            "objective": {"name": "pgd", "epsilon": EPSILON, "step": EPSILON, "steps": 2},
            "stages": stages,
            "evaluate": {"attacks": [ATTACK]},
        }
        return parse(content)

    def file(self, out: Path) -> Path:
        """Where its record is."""
        text = json.dumps([code(), *(self.recipe(method).to_yaml() for method in (self.method, RIVAL))])
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return out / "cells" / f"{self.recipe(self.method).name}-{digest}.json"


def code() -> str:
    """A hash of the code that decides what is pruned."""
    modules = [methods, allocation, rounding, training, units]
    sources = [Path(inspect.getfile(module)) for module in modules]
    sources[:1] = sorted(sources[0].parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def measure(cell: Cell, out: Path, stop: Stop) -> None:
    """Compute a cell and write its record."""
    began = time.monotonic()
    with stop.on_signals():
        ours, theirs = (one_run(cell, method, out, stop) for method in (cell.method, RIVAL))
    record = {
        "cell": cell.name,
        **asdict(cell),
        "ours": ours,
        "rival": theirs,
        "gap": 100 * (ours["robust"] - theirs["robust"]),
        "seconds": round(time.monotonic() - began, 1),
    }
    files.write_json(cell.file(out), record)


def one_run(cell: Cell, method: str, out: Path, stop: Stop) -> dict[str, Any]:
    """Prune and fine-tune by one method; what came of it."""
    if stop.signal is not None:
        raise Interrupted("stopped between two runs", stop.signal)
    run = Run(cell.recipe(method), out / f"runs-{code()}", stop=stop, workers=0)
    outcome = run.execute()
    natural, robust = outcome.results
    stage = json.loads((run.stage_folder(1) / "stage.json").read_text("utf-8"))
    history, chosen = stage["history"], stage["chosen_epoch"]
    kept = {name: int(mask.sum()) for name, mask in (outcome.masks or {}).items()}
    budget = run.units.total(cell.keep)
    chance = max(natural["totals"]) / natural["n"]
    return {
        "method": method,
        "met": any(epoch["epoch"] == chosen and epoch["ready"] for epoch in history) and sum(kept.values()) == budget,
        "ready_epochs": [epoch["epoch"] for epoch in history if epoch["ready"]],
        "chosen_epoch": chosen,
        "budget": budget,
        "kept": sum(kept.values()),
        "layers": kept,
        "natural": natural["value"],
        "natural_interval": [natural["low"], natural["high"]],
        "robust": robust["value"],
        "robust_interval": [robust["low"], robust["high"]],
        "chance": chance,
        "at_chance": natural["low"] <= chance,
        "dense_natural": outcome.dense[0]["value"],
        "dense_robust": outcome.dense[1]["value"],
        "n": natural["n"],
        "device": str(run.fabric.device),
        "versions": natural["versions"],
    }


class Display(Terminal):
    """A bar over cells, and a line with the numbers of each that is done."""

    def __init__(self, cells: Sequence[Cell], out: Path) -> None:
        super().__init__()
        self.files = {cell.name: cell.file(out) for cell in cells}

    def run_finished(self, name: str, failure: str | None, running: Sequence[str]) -> None:
        """Say what came of a cell."""
        if failure is None:
            self.note(f"{name}: {described(json.loads(self.files[name].read_text('utf-8')))}")
        super().run_finished(name, failure, running)


class Inside:
    """A cell computed in this process at once: `parallel.work` sees a process that has ended."""

    def __init__(self, cell: Cell, out: Path, stop: Stop) -> None:
        self.code = attempt(cell, out, stop)

    def poll(self) -> int:
        """The exit code."""
        return self.code

    def send_signal(self, sig: int) -> None:
        """Nothing: it has ended."""


class Child:
    """A cell computed in a process of its own, on one thread."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, cell: Cell, out: Path) -> None:
        self.context.set_forkserver_preload(["harp.experiments.run"])
        self.process = self.context.Process(target=in_child, args=(cell, out))
        self.process.start()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.process.exitcode

    def send_signal(self, sig: int) -> None:
        """Pass a signal on."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, sig)


def in_child(cell: Cell, out: Path) -> None:
    os.setsid()  # a terminal's Ctrl-C goes to the parent alone, which passes it on once
    torch.set_num_threads(1)
    sys.exit(attempt(cell, out, Stop()))


def attempt(cell: Cell, out: Path, stop: Stop) -> int:
    """Compute a cell; the exit code."""
    try:
        measure(cell, out, stop)
    except Interrupted:
        return UNFINISHED
    except HarpError as error:
        say(f"{cell.name}: {error}")
        return 1
    return 0


def described(record: dict[str, Any]) -> str:
    """A cell in a few words."""
    ours, rival = record["ours"], record["rival"]
    notes = [text for text, true in (("budget not met", not ours["met"]), ("at chance", ours["at_chance"])) if true]
    numbers = [f"{run['method']} {run['natural']:.1%} natural, {run['robust']:.1%} robust" for run in (ours, rival)]
    return "; ".join([*numbers, *notes, f"{record['seconds']:.0f} s"])


def table(records: Sequence[dict[str, Any]]) -> str:
    """One line per network and budget, in the mean over seeds, as Markdown."""
    method = records[0]["method"]
    columns = ["network", "keep", "weights", "dense", method, RIVAL, "gap", "worst gap", "budget met", "at chance"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for network, keep in dict.fromkeys((record["network"], record["keep"]) for record in records):
        some = [record for record in records if (record["network"], record["keep"]) == (network, keep)]
        ours, rival = [record["ours"] for record in some], [record["rival"] for record in some]
        gaps = [record["gap"] for record in some]
        fields = [
            network,
            f"{100 * keep:g} %",
            f"{ours[0]['budget']:,}",
            mean_of(ours, "dense_natural", "dense_robust"),
            mean_of(ours, "natural", "robust"),
            mean_of(rival, "natural", "robust"),
            f"{fmean(gaps):+.1f}",
            f"{min(gaps):+.1f}",
            f"{sum(run['met'] for run in ours)} of {len(some)}",
            f"{sum(run['at_chance'] for run in ours)} ({RIVAL}: {sum(run['at_chance'] for run in rival)})",
        ]
        lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines)


def mean_of(runs: Sequence[dict[str, Any]], *keys: str) -> str:
    """Mean accuracies in per cent, natural / robust."""
    return " / ".join(f"{100 * fmean(run[key] for run in runs):.1f}" for key in keys)


def collected(cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    """What all finished cells came to."""
    paths = [cell.file(out) for cell in cells]
    records = [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]
    worst = min(records, key=lambda record: record["gap"], default=None)
    unmet = [record["cell"] for record in records if not record["ours"]["met"]]
    chance = [r["cell"] for r in records if r["ours"]["at_chance"] and not r["rival"]["at_chance"]]
    first = records[0]["ours"] if records else {}
    return {
        "method": cells[0].method,
        "runs": len(records),
        "missing": len(cells) - len(records),
        "unmet": len(unmet),
        "unmet_cells": unmet,
        "at_chance": len(chance),
        "at_chance_cells": chance,
        "both_at_chance": sum(r["ours"]["at_chance"] and r["rival"]["at_chance"] for r in records),
        "worst_gap_to_hydra_lamp": None if worst is None else round(worst["gap"], 2),
        "worst_cell": None if worst is None else worst["cell"],
        "mean_gap_to_hydra_lamp": round(fmean(r["gap"] for r in records), 2) if records else None,
        "seeds": sorted({cell.seed for cell in cells}),
        "epsilon": EPSILON,
        "attack": ATTACK,
        "n": first.get("n"),
        "device": first.get("device"),
        "versions": first.get("versions", {"harp": harp.__version__, "torch": str(torch.__version__)}),
        "code": code(),
        "training": asdict(cells[0].training),
        "cells": records,
    }


def share(text: str) -> float:
    """A budget, like 0.5% or 0.005."""
    try:
        value = float(number(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share above 0 and at most 1, like 0.5%")
    return value


def method_name(text: str) -> str:
    """A method that prunes a trained network, with its options if there are any."""
    try:
        known = study.method(text)
    except HarpError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if known.name in (study.DENSE, study.SMALL) or methods.PRUNERS[known.name].from_scratch:
        raise argparse.ArgumentTypeError(f"{text!r} does not prune a trained network")
    return text


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("stability.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", type=method_name, default="harp", help="written as for `harp compare`")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--keep", nargs="+", type=share, metavar="SHARE", help="such as 10%% 1%%")
    parser.add_argument("--seeds", nargs="+", type=int)
    names = ("PRETRAIN", "PRUNE", "FINETUNE")
    parser.add_argument("--epochs", nargs=3, type=positive, metavar=names, help=f"default {FULL.epochs}")
    parser.add_argument("--images", type=positive, help=f"training images, default {FULL.images}")
    parser.add_argument("--jobs", type=positive, default=2, help="cells side by side; with 1 in this process")
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.add_argument("--max-minutes", type=float, help="stop in time; the same command goes on from there")
    parser.add_argument("--short", action="store_true", help="one network, three budgets, one seed, less training")
    return parser.parse_args(argv)


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """The cells, seed by seed and network by network."""
    usual = SHORT if arguments.short else FULL
    training = Training(arguments.images or usual.images, tuple(arguments.epochs or usual.epochs))
    networks = arguments.networks or (["plain"] if arguments.short else list(NETWORKS))
    keep = arguments.keep or [share(text) for text in (("10%", "1%", "0.25%") if arguments.short else KEEP)]
    seeds = arguments.seeds or ([1] if arguments.short else [1, 2])
    return [
        Cell(arguments.method, network, budget, seed, training)
        for seed in dict.fromkeys(seeds)
        for network in dict.fromkeys(networks)
        for budget in sorted(set(keep), reverse=True)
    ]


def compute(cells: Sequence[Cell], out: Path, jobs: int, stop: Stop, display: Quiet) -> dict[str, str]:
    """Compute the cells that are not there yet; what went wrong, by cell.

    The first cell of a network and seed trains what the others begin with, so these wait for it.
    """
    waiting = {cell.name: cell for cell in cells if not cell.file(out).exists()}
    first: dict[tuple[str, int], str] = {}
    for cell in waiting.values():
        first.setdefault((cell.network, cell.seed), cell.name)
    leaders = [pool.Task(name) for name in first.values()]
    others = [
        pool.Task(cell.name, first[cell.network, cell.seed])
        for cell in waiting.values()
        if cell.name != first[cell.network, cell.seed]
    ]

    def start(name: str) -> pool.Process:
        cell = waiting[name]
        return Child(cell, out) if jobs > 1 else Inside(cell, out, stop)

    return pool.work([*leaders, *others], start, jobs, display, len(cells), stop)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    cells = cells_of(arguments)
    display = Display(cells, arguments.out)
    failed: dict[str, str] = {}
    status = 0
    try:
        stop = Stop(arguments.max_minutes)
        failed = compute(cells, arguments.out, arguments.jobs, stop, display)
        status = 1 if failed else 0
    except Interrupted as error:
        display.note(f"{error}; the same command goes on from there")
        status = error.code
    except HarpError as error:
        display.note(f"stability.py: {error}")
        return 2
    result = {**collected(cells, arguments.out), "failed": failed}
    if result["cells"]:
        print(f"natural / robust accuracy in %, mean over seeds; {ATTACK} at epsilon {EPSILON}\n")
        print(table(result["cells"]) + "\n")
    worst = "" if result["worst_cell"] is None else f", worst gap {result['worst_gap_to_hydra_lamp']:+.1f} points"
    print(f"{result['runs']} cells, {result['unmet']} unmet, {result['at_chance']} at chance{worst}")
    print(json.dumps(result))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
