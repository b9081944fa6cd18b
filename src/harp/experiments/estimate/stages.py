"""The estimate of a recipe on this machine: every stage is measured in a process of its own, then all are summed up.

    stage       epochs · (steps · seconds a step  +  held-out images · seconds an image  +  seconds an epoch)
    evaluation  test images · seconds an image, of each attack, before and after pruning

The spread is from the lower to the upper quartile of the steps' times. Attacks that drop fooled images are measured as
if no image was fooled. That is the upper end; the middle assumes that half of the images are, the lower end three
quarters.
"""

import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from harp.errors import ModelError, RecipeError
from harp.experiments import energy
from harp.experiments.estimate.measure import AttackTime, Measurement, Request
from harp.experiments.estimate.sizes import Sizes
from harp.experiments.recipe import Recipe, Stage
from harp.system.distributed import affinity
from harp.system.files import amount, existing
from harp.system.interrupt import handled, stop_signals
from harp.system.memory import machine_memory
from harp.system.progress import Quiet

_SECONDS = 10.0  # for the steps of a stage
_NOT_FOOLED = (0.25, 0.5, 1.0)  # shares of images, for attacks that drop fooled images
_IDLE = 0.7  # a smaller share of the cores means that other processes use them
_MARGIN = 1.1  # of memory and disk space, as measurements are not exact

Row = dict[str, Any]


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
    """Measure every stage of a recipe and return what a run takes: seconds, bytes, kWh and grams."""
    if min(devices, steps, keep_states) < 1:
        raise RecipeError(f"devices {devices}, steps {steps}, keep states {keep_states}: give at least 1")
    if made.data.batch % devices:
        raise RecipeError(f"batch {made.data.batch} for {devices} processes, expected a multiple of {devices}")
    display = display or Quiet()
    pruning = next((n for n, stage in enumerate(made.stages) if stage.pruner["name"] != "dense"), None)
    measured = []
    with display.counting_runs("stages", len(made.stages)):
        for number, stage in enumerate(made.stages):
            display.active_runs([stage.name])
            request = Request(
                recipe=made,
                sizes=sizes,
                stage=number,
                batch=made.data.batch // devices,
                steps=steps,
                seconds=_SECONDS,
                before=number == pruning,
                after=number == len(made.stages) - 1,
            )
            measured.append(_measure(request, devices))
            display.run_finished(stage.name, None, [])
    return summed(made, sizes, measured, devices, out, intensity, keep_states)


def _measure(request: Request, devices: int) -> Measurement:
    """Measure a stage in another process, which ends with this one."""
    words = [sys.executable, "-m", "harp.experiments.estimate.measure"]
    pipe, variables, process = subprocess.PIPE, environment(devices), None
    try:
        with _signals_wait():
            # Here too: pydantic turns a Ctrl-C inside it into an error of its own.
            message = request.model_dump_json(exclude_defaults=True)
            process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=variables, start_new_session=True
            )
        out, err = process.communicate(message)
    except BaseException:
        if process is not None:
            process.kill()
            process.communicate()
        raise
    if process.returncode:
        name = request.recipe.stages[request.stage].name
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        if process.returncode < 0:
            remedy = f"A smaller data.batch or a larger stages.{name}.accumulate helps"
            reason = f"signal {-process.returncode}: out of memory? {remedy}"
        raise ModelError(f"stage {name!r} can't be measured: {reason.removeprefix('harp.errors.')}")
    return Measurement.model_validate_json(out.splitlines()[-1])


def environment(devices: int) -> dict[str, str]:
    """The environment variables of one of several processes: on a CPU it gets its share of the cores, as in a run."""
    variables = {"OMP_WAIT_POLICY": "PASSIVE"}
    if devices > 1 and not torch.cuda.is_available():
        variables["OMP_NUM_THREADS"] = str(max(1, len(affinity.usable()) // devices))
    return variables | os.environ


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay signals until the end of the block: one that comes while a process is started would orphan it."""
    came: list[int] = []
    numbers = stop_signals() if threading.current_thread() is threading.main_thread() else []  # others get no signals
    with handled(dict.fromkeys(numbers, lambda number, frame: came.append(number))):
        yield
    for number in came:
        signal.raise_signal(number)


def summed(
    made: Recipe,
    sizes: Sizes,
    measured: Sequence[Measurement],
    devices: int,
    out: Path,
    intensity: float,
    keep_states: int = 2,
) -> dict[str, Any]:
    """What a run takes, by the measurements of its stages."""
    images, held, examples = sizes.trained(made), made.data.held(sizes.train), made.evaluate.examples or sizes.test
    batch, device = made.data.batch // devices, measured[0].device
    data = 0 if device == "cuda" else sizes.memory()
    steps = math.ceil(images / made.data.batch)
    rows = [
        _row(stage, facts, steps, held / devices, batch)
        | {"memory": facts.peak_bytes + data, "fixed_memory": facts.base_bytes + data}
        for stage, facts in zip(made.stages, measured, strict=True)
    ]
    pruned = "pruned" if any(facts.before for facts in measured) else ""
    times = [("dense", each) for facts in measured for each in facts.before.items()]
    times += [(pruned, each) for facts in measured for each in facts.after.items()]
    evaluations = [_evaluation(network, name, time, examples, devices) for network, (name, time) in times]
    totals = [sum(part[key] for part in (*rows, *evaluations)) for key in ("low", "seconds", "high")]
    power, by = _power(measured, devices)
    used = energy.estimate(totals[1] / 3600, watts=power, intensity=intensity)
    needs = _needs(measured, rows, devices, out, keep_states)
    return {
        "recipe": made.name,
        "data": {"name": made.data.name, "train": images, "held": held, "test": examples, "shape": list(sizes.shape)},
        "devices": devices,
        "device": device,
        "stages": rows,
        "evaluation": evaluations,
        **_spread(totals),
        "energy": {"watts": power, "kwh": used["kwh"], "co2_g": used["co2_g"], "by": by, "intensity": intensity},
        "needs": needs,
        "warnings": _warnings(made, rows, needs),
        "notes": _notes(rows, evaluations, devices, sizes, device == "cuda"),
    }


def _power(measured: Sequence[Measurement], devices: int) -> tuple[float, str]:
    """The power in watts, and how it is known: measured with the stages, or assumed.

    A measured power is that of the whole machine with one process: it says little of several.
    """
    metered = [facts for facts in measured if facts.energy_by.startswith("codecarbon")]
    if metered and devices == 1:
        return statistics.fmean(facts.watts for facts in metered), metered[0].energy_by
    power = energy.assumed(measured[0].device, devices)
    return power, f"an assumed {power:g} W"


def _row(stage: Stage, facts: Measurement, steps: int, held: float, batch: int) -> Row:
    """The time of a stage."""
    row: Row = {"name": stage.name, "epochs": stage.epochs, "steps": steps, "measured": len(facts.steps)}
    if not facts.steps:
        return row | {"step": None, "scaled": False, **_spread([facts.once_seconds] * 3)}
    several = len(facts.steps) > 1
    quartiles = statistics.quantiles(facts.steps, n=4, method="inclusive") if several else facts.steps * 3
    validation = held * facts.validation_seconds
    rest = validation + facts.epoch_seconds
    return row | {
        "step": quartiles[1],
        "scaled": facts.batch < batch,
        "measured_batch": facts.batch,
        "share": facts.share,
        "validation": validation,
        "epoch_end": facts.epoch_seconds,
        **_spread([stage.epochs * (steps * seconds + rest) for seconds in quartiles]),
    }


def _evaluation(network: str, name: str, time: AttackTime, examples: int, devices: int) -> Row:
    """The time of an attack on all test images."""
    shares = _NOT_FOOLED if time.bound else (1.0, 1.0, 1.0)
    times = [share * time.seconds * examples / devices for share in shares]
    row = {"network": network, "name": name, "images": examples, "an_image": time.seconds, "bound": time.bound}
    return row | _spread(times)


def _spread(times: list[float]) -> dict[str, float]:
    return dict(zip(("low", "seconds", "high"), times, strict=True))


def _needs(measured: Sequence[Measurement], rows: list[Row], devices: int, out: Path, keep_states: int) -> Row:
    cuda = measured[0].device == "cuda"
    state = max(facts.state_bytes for facts in measured)
    results = sum(facts.result_bytes for facts in measured) + measured[-1].result_bytes
    return {
        "memory": max(row["memory"] for row in rows) * (1 if cuda else devices),
        "memory_free": measured[0].device_bytes if cuda else free_memory(),
        "memory_of": "each GPU" if cuda else "this machine",
        "state": state,
        "results": results,
        "disk": (keep_states + 1) * state + results,  # the kept states, and the one that is being written
        "disk_free": free_disk(out),
    }


def free_memory() -> int | None:
    """Bytes of memory that a new process can use; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return machine_memory()  # all memory of the machine: the best guess


def free_disk(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def _warnings(made: Recipe, rows: list[Row], needs: Row) -> list[str]:
    texts = []
    free, needed = needs["memory_free"], needs["memory"]
    if free is not None and needed * _MARGIN > free:
        worst = max(rows, key=lambda row: row["memory"])
        available = max(1.0, free / _MARGIN - worst["fixed_memory"])
        parts = 2 ** max(1, math.ceil(math.log2(max(2.0, (worst["memory"] - worst["fixed_memory"]) / available))))
        texts.append(
            f"stage {worst['name']!r} needs {amount(needed)} of memory, {needs['memory_of']} has {amount(free)}: try "
            f"--set stages.{worst['name']}.accumulate={min(parts, made.data.batch)} (the same result) or a smaller "
            "data.batch"
        )
    if needs["disk"] * _MARGIN > needs["disk_free"]:
        disk = f"{amount(needs['disk'])} of disk space, {amount(needs['disk_free'])} are free"
        texts.append(f"the run needs {disk}: choose another --out")
    return texts


def _notes(rows: list[Row], evaluations: list[Row], devices: int, sizes: Sizes, cuda: bool) -> list[str]:
    texts = []
    scaled = [f"{row['name']} ({row['measured_batch']} images)" for row in rows if row["scaled"]]
    if scaled:
        texts.append(f"measured with smaller batches and scaled, as a whole one takes too long: {', '.join(scaled)}")
    if names := dict.fromkeys(row["name"] for row in evaluations if row["bound"]):
        spread = "the upper end is for no fooled image, the middle for half of them"
        texts.append(f"{', '.join(names)}: fooled images leave early; {spread}")
    if devices > 1:
        texts.append(f"{devices} processes: measured with the part of one, without their communication")
    busy = [row["share"] for row in rows if row.get("share", 1.0) < _IDLE]
    if busy and not cuda:
        texts.append(f"others use this machine: the steps had {min(busy):.0%} of its cores, and alone they are faster")
    if sizes.streamed:
        texts.append("decoding the images is not included: it runs beside the training if there are enough cores")
    return [*texts, "steps are those of the first epoch: methods that get sparser later get faster on a CPU"]
