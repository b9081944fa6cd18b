"""The estimate of a recipe on this machine: every stage measured in a process of its own, and summed up.

    stage       epochs · (steps · seconds a step  +  held-out images · seconds an image  +  seconds an epoch)
    evaluation  test images · seconds an image, of each attack, before and after pruning

The spread is from the lower to the upper quartile of the steps' times. Attacks that let fooled images go are measured
as if every image held out. That is the upper end; the middle assumes that half of the images do, the lower end a
quarter.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from harp.errors import ModelError, RecipeError
from harp.evaluation import runner
from harp.experiments import energy
from harp.experiments.estimate import machine, measuring
from harp.experiments.estimate.known import Sizes
from harp.experiments.estimate.passes import Passes
from harp.experiments.recipe import Recipe
from harp.system.distributed import affinity
from harp.system.files import amount
from harp.system.interrupt import handled, stop_signals
from harp.system.progress import Quiet

_SECONDS = 10.0  # that the steps of a stage may take
_HOLDING_OUT = (0.25, 0.5, 1.0)  # shares of images that an attack in steps does not fool
_IDLE = 0.7  # share of the cores below which somebody else has them
_ROOM = 1.1  # of memory and disk: measurements are not that exact

Spread = tuple[float, float, float]


def estimate(
    made: Recipe,
    sizes: Sizes,
    *,
    devices: int = 1,
    steps: int = 5,
    out: Path = Path("runs"),
    intensity: float = energy.INTENSITY,
    keep_states: int = 2,
    display: Quiet | None = None,
) -> dict[str, Any]:
    """Measure every stage of a recipe and say what all of it takes, as plain numbers: seconds, bytes, kWh, grams."""
    if min(devices, steps, keep_states) < 1:
        raise RecipeError(f"devices {devices}, steps {steps}, keep states {keep_states}: give at least 1")
    if made.data.batch % devices:
        raise RecipeError(f"batch {made.data.batch} for {devices} processes, expected a multiple of {devices}")
    display = display or Quiet()
    names = [stage.pruner["name"] for stage in made.stages]
    pruning = next((number for number, name in enumerate(names) if name != "dense"), None)
    found, passes = list[dict[str, Any]](), Passes()
    with display.counting_runs("stages", len(made.stages)):
        for number, stage in enumerate(made.stages):
            display.active_runs([stage.name])
            wish = measuring.Wish(
                stage=number,
                batch=made.data.batch // devices,
                sizes=sizes,
                steps=steps,
                seconds=_SECONDS,
                before=number == pruning,
                after=number == len(made.stages) - 1,
            )
            found.append(_measured(made, wish, devices))
            step = passes.of_step(made, stage) if stage.epochs else 0.0
            found[-1]["operations"] = step * passes.operations(made, sizes, number)
            display.run_finished(stage.name, None, [])
    return summed(made, sizes, found, devices, out, intensity, keep_states)


def _measured(made: Recipe, wish: measuring.Wish, devices: int) -> dict[str, Any]:
    """Let a process of its own measure a stage; it ends with this one."""
    words = [sys.executable, "-m", "harp.experiments.estimate.measuring"]
    pipe = subprocess.PIPE
    process = None
    try:
        with _unbroken():
            process = subprocess.Popen(
                words,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                env=environment(devices),
                start_new_session=True,
            )
        out, err = process.communicate(measuring.message(made, wish))
    except BaseException:
        if process is not None:
            process.kill()
            process.communicate()
        raise
    name = made.stages[wish.stage].name
    if process.returncode:
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {process.returncode}"
        if process.returncode < 0:
            why = f"signal {-process.returncode}: out of memory? A smaller data.batch or stages.{name}.accumulate helps"
        raise ModelError(f"stage {name!r} can't be measured: {why.removeprefix('harp.errors.')}")
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def environment(devices: int) -> dict[str, str]:
    """The variables of a process that is one of so many: on a CPU it gets its share of the cores, as in a run."""
    found = {"OMP_WAIT_POLICY": "PASSIVE"}
    if devices > 1 and not torch.cuda.is_available():
        found["OMP_NUM_THREADS"] = str(max(1, len(affinity.usable()) // devices))
    return found | os.environ


@contextmanager
def _unbroken() -> Iterator[None]:
    """Let signals wait for the end of the block: one that came while a process is being started would orphan it."""
    came: list[int] = []
    numbers = (
        stop_signals() if threading.current_thread() is threading.main_thread() else []
    )  # others are never interrupted
    with handled(dict.fromkeys(numbers, lambda number, frame: came.append(number))):
        yield
    for late in came:
        signal.raise_signal(late)


def summed(
    made: Recipe,
    sizes: Sizes,
    found: list[dict[str, Any]],
    devices: int,
    out: Path,
    intensity: float,
    keep_states: int = 2,
) -> dict[str, Any]:
    """What a run of the stages takes, by what was measured of each."""
    images, held, examples = sizes.trained(made), sizes.held(made), made.evaluate.examples or sizes.test
    own = made.data.batch // devices
    rows = []
    for stage, facts in zip(made.stages, found, strict=True):
        row = _row(stage, facts, images, held, made.data.batch, own, devices)
        rows.append(row | _memory(facts, own, stage.accumulate, sizes))
    evaluations = []
    for key, what in (("before", "dense"), ("after", "pruned" if any("before" in each for each in found) else "")):
        for facts in found:
            for name, told in facts.get(key, {}).items():
                shares = _HOLDING_OUT if told["bound"] else (1.0, 1.0, 1.0)
                times = [share * told["seconds"] * examples / devices for share in shares]
                facts_of = {"network": what, "name": name, "images": examples, "an_image": told["seconds"]}
                evaluations.append({**facts_of, "bound": told["bound"], **_spread(times)})
    totals = [sum(part[key] for part in (*rows, *evaluations)) for key in ("low", "seconds", "high")]
    power, by = _power(found, devices)
    kwh = energy.estimate(totals[1] / 3600, watts=power, intensity=intensity)
    needs = _needs(found, rows, devices, out, keep_states)
    return {
        "recipe": made.name,
        "data": {"name": made.data.name, "train": images, "held": held, "test": examples, "shape": list(sizes.shape)},
        "devices": devices,
        "device": found[0]["device"],
        "stages": rows,
        "evaluation": evaluations,
        **_spread(totals),
        "energy": {
            "watts": power,
            "by": by,
            "kwh": kwh["kwh"],
            "co2_g": kwh["co2_g"],
            "intensity": intensity,
        },
        "needs": needs,
        "warnings": _warnings(made, rows, needs),
        "notes": _notes(rows, evaluations, devices, sizes, found[0]["device"] == "cuda"),
    }


def _power(found: list[dict[str, Any]], devices: int) -> tuple[float, str]:
    """The watts that were measured while the stages were, or those that are assumed; and by what.

    What is measured is the whole machine, with one process at work: that says little of several.
    """
    measured = [facts for facts in found if str(facts.get("energy_by")).startswith("codecarbon")]
    if measured and devices == 1:
        return statistics.fmean(facts["watts"] for facts in measured), measured[0]["energy_by"]
    power = energy.assumed(found[0]["device"], devices)
    return power, f"an assumed {power:g} W"


def _row(
    stage: Any, facts: dict[str, Any], images: int, held: int, batch: int, own: int, devices: int
) -> dict[str, Any]:
    """A stage's time."""
    steps = math.ceil(images / batch)
    row: dict[str, Any] = {"name": stage.name, "epochs": stage.epochs, "steps": steps, "measured": len(facts["steps"])}
    if not facts["steps"]:
        once = facts["once_seconds"]
        return row | {"step": None, "scaled": False, "gflops": None, **_spread([once] * 3)}
    scale = facts.get("scale", own / facts["batch"])
    median = scale * statistics.median(facts["steps"])
    quartiles = [median] * 3
    if len(facts["steps"]) > 1:
        low, _, high = statistics.quantiles(facts["steps"], n=4, method="inclusive")
        quartiles = [scale * low, median, scale * high]
    rest = held * facts["validation_seconds"] / devices + facts["epoch_seconds"]
    return row | {
        "step": median,
        "scaled": facts["batch"] < own,
        "measured_batch": facts["batch"],
        "share": facts["share"],
        "validation": held * facts["validation_seconds"] / devices,
        "epoch_end": facts["epoch_seconds"],
        "gflop_an_image": facts["operations"] / 1e9,
        "gflops": facts["operations"] * own / median / 1e9,
        **_spread([stage.epochs * (steps * each + rest) for each in quartiles]),
    }


def _spread(times: list[float]) -> dict[str, float]:
    return dict(zip(("low", "seconds", "high"), times, strict=True))


def _memory(facts: dict[str, Any], own: int, accumulate: int, sizes: Sizes) -> dict[str, Any]:
    """A process's peak: as measured, or from two smaller batches; and the data, of which only a part was there."""
    peak = facts["peak_bytes"]
    if "bytes_an_image" in facts:
        # An attack of an evaluation keeps about half of what training on as many images does.
        most = max(math.ceil(own / accumulate), runner.BATCH // 2)
        peak += facts["bytes_an_image"] * max(0, most - facts["peak_batch"])
    data = sizes.memory() if facts["device"] != "cuda" else 0
    return {"memory": int(peak + data), "fixed_memory": int(facts["base_bytes"] + data)}


def _needs(
    found: list[dict[str, Any]], rows: list[dict[str, Any]], devices: int, out: Path, keep_states: int
) -> dict[str, Any]:
    cuda = found[0]["device"] == "cuda"
    state = max(facts["state_bytes"] for facts in found)
    results = sum(facts["result_bytes"] for facts in found) + found[-1]["result_bytes"]
    return {
        "memory": max(row["memory"] for row in rows) * (1 if cuda else devices),
        "memory_free": found[0].get("device_bytes") if cuda else machine.free_memory(),
        "memory_of": "each GPU" if cuda else "this machine",
        "state": state,
        "results": results,
        "disk": (keep_states + 1) * state + results,  # while one is being written the others are kept
        "disk_free": machine.free_disk(out),
    }


def _warnings(made: Recipe, rows: list[dict[str, Any]], needs: dict[str, Any]) -> list[str]:
    said = []
    free = needs["memory_free"]
    if free is not None and needs["memory"] * _ROOM > free:
        worst = max(rows, key=lambda row: row["memory"])
        room = max(1.0, free / _ROOM - worst["fixed_memory"])
        parts = 2 ** max(1, math.ceil(math.log2(max(2.0, (worst["memory"] - worst["fixed_memory"]) / room))))
        parts = min(parts, made.data.batch)
        said.append(
            f"stage {worst['name']!r} needs {amount(needs['memory'])} of memory, {needs['memory_of']} has "
            f"{amount(free)}: try --set stages.{worst['name']}.accumulate={parts} (the same result) or a smaller "
            "data.batch"
        )
    if needs["disk"] * _ROOM > needs["disk_free"]:
        said.append(
            f"it needs {amount(needs['disk'])} of disk and {amount(needs['disk_free'])} are free: choose another --out"
        )
    return said


def _notes(
    rows: list[dict[str, Any]], evaluations: list[dict[str, Any]], devices: int, sizes: Sizes, cuda: bool
) -> list[str]:
    said = []
    scaled = [row for row in rows if row["scaled"]]
    if scaled:
        which = ", ".join(f"{row['name']} ({row['measured_batch']} images)" for row in scaled)
        said.append(f"measured with smaller batches and scaled, as a whole one would take too long: {which}")
    if any(each["bound"] for each in evaluations):
        names = dict.fromkeys(each["name"] for each in evaluations if each["bound"])
        said.append(
            f"{', '.join(names)}: fooled images leave early; the upper end is as if none did, the middle as if half did"
        )
    if devices > 1:
        said.append(f"{devices} processes: measured with the part of one, without what they tell each other")
    busy = [row["share"] for row in rows if row.get("share", 1.0) < _IDLE]
    if busy and not cuda:
        said.append(f"others use this machine: the steps had {min(busy):.0%} of its cores, and alone they are faster")
    if sizes.streamed:
        said.append("decoding the images is not part of it: that runs beside the training if there are enough cores")
    said.append("steps are those of the first epoch: methods that get sparser on the way get faster on a CPU")
    return said
