"""Measure one stage of a recipe in a process of its own, so that its peak memory is that of the stage alone.

`python -m harp.experiments.estimate.measure` reads a `Request` as JSON from standard input and prints a `Measurement`.

A `harp.experiments.run.Run` does the stage on images of noise in a temporary folder: with the same loop, pruner,
objective, validation and files as the run that is estimated. The stages before it have no epochs; one that prunes
prunes by magnitude, so that there are masks.
"""

import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from harp.attacks.batched import Packing, Stepwise
from harp.attacks.fast_forward import frozen
from harp.data.dataset import DataSet
from harp.evaluation import runner
from harp.evaluation.predict import predicted
from harp.experiments import build, recipe
from harp.experiments.estimate.sizes import Sizes
from harp.experiments.recipe import Recipe, Stage
from harp.experiments.run import Run
from harp.pruning.masks import Masks
from harp.pruning.methods import Pruner
from harp.system.memory import most_resident, resident
from harp.training import objectives
from harp.training.base import Objective
from harp.training.checkpointing import Keeper
from harp.training.loop import Fitted
from harp.training.metrics import MetricsFile

WARM_UP = 2  # steps that are not counted: they trace, compile and fill caches
_MOST_STEPS = 40
_LEAST_SECONDS = 1.0  # of the counted steps together: a few steps of a millisecond would be too noisy
_MEMORY_SECONDS = 6.0  # for the steps that measure the memory of large batches
_TINY = 1e-6  # the radius of a ball in which no prediction changes
_TIMED_STEPS = 5  # of an attack
_OF_FILES = ("size", "stream", "crop", "margin", "corrupt")  # keys of a recipe's data that noise does not have


class Request(BaseModel):
    """What to measure: a stage by its number, with so many steps, in about so many seconds."""

    recipe: Recipe
    sizes: Sizes
    stage: int
    batch: int  # of one process
    steps: int
    seconds: float
    before: bool = False  # measure the evaluation of the network before the stage
    after: bool = False  # and after it


class AttackTime(BaseModel):
    """The time of an attack of the evaluation."""

    seconds: float  # for an image
    bound: bool  # fooled images take less


class Measurement(BaseModel):
    """The measured time, memory, disk space and power of a stage."""

    device: str
    batch: int  # smaller than the requested one, if that would take too long
    steps: list[float] = []  # seconds of each step of the requested batch
    once_seconds: float = 0.0  # of a stage without steps
    share: float = 1.0  # of the cores' time that the steps had
    validation_seconds: float = 0.0  # for an image
    epoch_seconds: float = 0.0  # of the end of an epoch, without validation
    watts: float = 0.0
    energy_by: str = ""
    base_bytes: int = 0  # memory before the stage
    peak_bytes: int = 0  # with the requested batch
    state_bytes: int = 0
    result_bytes: int = 0
    device_bytes: int | None = None  # memory of the GPU
    before: dict[str, AttackTime] = {}
    after: dict[str, AttackTime] = {}


class TimedRun(Run):
    """A run that measures its steps, its validation and its state."""

    def __init__(self, made: Recipe, root: Path, source: DataSet) -> None:
        super().__init__(made, root, source=source)
        self.measured = Measurement(device=self.fabric.device.type, batch=made.data.batch)
        self.stamps: list[float] = []  # the ends of the steps
        self.busy: list[float] = []  # processor time at the stamps

    def after_step(self, record: dict[str, Any]) -> None:
        """Note the time."""
        self.stamps.append(time.perf_counter())
        self.busy.append(time.process_time())

    def validate(self, objective: Objective) -> dict[str, float]:
        """Validate as after every epoch, and note how long it takes."""
        began = time.perf_counter()
        accuracies = super().validate(objective)
        self.measured.validation_seconds = (time.perf_counter() - began) / len(self.held)
        return accuracies

    def fit_stage(
        self, number: int, stage: Stage, pruner: Pruner, keeper: Keeper, log: MetricsFile
    ) -> tuple[Fitted, dict[str, Any]]:
        """Train as in a run, and note the time of the end of the epoch, the power and the size of the state."""
        fitted, energy = super().fit_stage(number, stage, pruner, keeper, log)
        if self.stamps:
            measured, after_steps = self.measured, time.perf_counter() - self.stamps[-1]
            measured.epoch_seconds = max(0.0, after_steps - measured.validation_seconds * len(self.held))
            measured.watts, measured.energy_by = energy["kwh"] * 3.6e6 / max(fitted.seconds, 1e-9), energy["by"]
            states = [path for path in log.path.parent.glob("state*") if path.is_file()]
            measured.state_bytes = max((path.stat().st_size for path in states), default=0)
        return fitted, energy

    def seconds(self) -> list[float]:
        """The seconds of the steps after the first one, which also prepares."""
        return [later - earlier for earlier, later in pairwise(self.stamps)]

    def share(self) -> float:
        """The part of the time that the threads computed: less than 1 where other processes use the cores."""
        waited = self.stamps[-1] - self.stamps[0]
        return (self.busy[-1] - self.busy[0]) / waited / torch.get_num_threads() if waited else 1.0


def measure(request: Request) -> Measurement:
    """Measure a stage in this process."""
    stage = request.recipe.stages[request.stage]
    one_pass = _seconds_of_a_pass(request)
    batch, steps = affordable(request, one_pass * _passes(request.recipe.stage_objective(stage)))
    if batch == request.batch or not stage.epochs:
        return _measure(request, request.batch, steps, one_pass)
    # A whole batch takes too long: a line through two smaller ones gives its memory, and another line its time.
    quiet = request.model_copy(update={"before": False, "after": False})
    peak = _peak(quiet, one_pass)
    half = _measure(quiet, batch // 2, 1, one_pass)
    full = _measure(request, batch, steps, one_pass)
    median = statistics.median(full.steps)
    each = (median - statistics.median(half.steps)) / (batch - batch // 2)
    if not 0 < each < median / batch:  # noise: in proportion to the images then, which is the most it can be
        each = median / batch
    scale = 1 + each * (request.batch - batch) / median
    return full.model_copy(update={"steps": [scale * seconds for seconds in full.steps], "peak_bytes": peak})


def _peak(request: Request, one_pass: float) -> int:
    """The peak memory with a whole batch. It is the same for every step of an attack, so that one step will do."""
    stage = request.recipe.stages[request.stage]
    objective = dict(request.recipe.stage_objective(stage))
    objective |= {key: 1 for key in ("steps", "replays") if key in objectives.options(objective["name"])}
    # An attack of the evaluation keeps about half of the memory of training on as many images.
    images = max(math.ceil(request.batch / stage.accumulate), runner.BATCH // 2)
    batch = min(math.ceil(request.batch / stage.accumulate), max(4, int(_MEMORY_SECONDS / (10 * one_pass))))
    half, full = (_measure(request, size, 1, one_pass, objective).peak_bytes for size in (max(1, batch // 2), batch))
    return int(full + max(0, full - half) / max(1, batch - batch // 2) * max(0, images - batch))


def affordable(request: Request, seconds: float) -> tuple[int, int]:
    """The batch and the number of counted steps, at `seconds` for an image in a step."""
    step = seconds * request.batch
    if step * (WARM_UP + request.steps) <= request.seconds:
        steps = max(request.steps, int(_LEAST_SECONDS / step) if step else _MOST_STEPS)
        return request.batch, min(steps, max(request.steps, _MOST_STEPS))
    fitting = int(request.seconds / (seconds * (1 + request.steps)))
    return min(request.batch, max(4, fitting)), request.steps if fitting >= 4 else 1


def _measure(
    request: Request, batch: int, steps: int, one_pass: float, objective: dict[str, Any] | None = None
) -> Measurement:
    """Do the stage with batches of one size, and perhaps under another objective."""
    gc.collect()  # what is left of an earlier measurement is not part of the peak
    stage = request.recipe.stages[request.stage]
    whole = batch == request.batch
    images = request.recipe.data.held(request.sizes.train)
    held = max(2, min(images, runner.BATCH, int(2.0 / (25 * one_pass)) if one_pass else images))
    with tempfile.TemporaryDirectory() as root:
        run = _run(request, batch, (WARM_UP if whole else 1) + steps, held, Path(root), objective)
        answer: Masks | None = None
        for number, earlier in enumerate(run.recipe.stages[: request.stage]):
            answer = run.stage(number, earlier, answer)
        measured, device = run.measured, run.fabric.device
        if request.before:
            measured.before = _attack_times(run, one_pass, held)
        began, measured.base_bytes = time.perf_counter(), resident() or 0
        run.stage(request.stage, run.recipe.stages[request.stage], answer)
        if stage.epochs:
            measured.steps, measured.share = run.seconds()[-steps:], run.share()
        else:
            measured.once_seconds = time.perf_counter() - began
        if device.type == "cuda":
            measured.peak_bytes = torch.cuda.max_memory_allocated(device)
            measured.device_bytes = torch.cuda.mem_get_info(device)[1]
        else:
            measured.peak_bytes = most_resident() or 0
        files = [path for path in run.stage_folder(request.stage).rglob("*") if path.is_file()]
        measured.result_bytes = sum(path.stat().st_size for path in files)
        if request.after:
            measured.after = _attack_times(run, one_pass, held)
        return measured


def _run(request: Request, batch: int, steps: int, held: int, root: Path, objective: dict[str, Any] | None) -> TimedRun:
    """The recipe on noise: one epoch of so many steps in the measured stage, none in the others.

    A whole batch is split as the recipe says; a smaller one is not.
    """
    content = request.recipe.model_dump(mode="json", exclude_defaults=True)
    kept = {key: value for key, value in content["data"].items() if key not in _OF_FILES}
    content["data"] = {**kept, "batch": batch, "holdout": held, "train": None}
    for number, stage in enumerate(content["stages"]):
        stage["epochs"] = min(1, stage["epochs"]) if number == request.stage else 0
        if number < request.stage and request.recipe.stages[number].prunes:
            strategy = stage["pruner"].get("strategy", "blend") if request.recipe.units.kind == "weights" else "uniform"
            stage["pruner"] = {"name": "magnitude", "keep": stage["pruner"]["keep"], "strategy": strategy}
        if batch < request.batch:
            stage["accumulate"] = 1
        if number == request.stage and objective is not None:
            stage["objective"] = objective
    noise = request.sizes.noise(batch * steps + held, 2 * runner.BATCH if held > 64 else 2)
    return TimedRun(recipe.parse(content), root, noise)


def _attack_times(run: Run, one_pass: float, images: int) -> dict[str, AttackTime]:
    """The time of each attack of the recipe's evaluation."""
    device = next(run.model.parameters()).device
    x = run.data.test.images[: min(images, 32)].to(device).float().div(255)
    ball = build.threat(run.recipe)
    times = {}
    for name, attack in [("natural", None), *(build.attack_of(part, ball) for part in run.recipe.evaluate.attacks)]:
        seconds, bound = seconds_an_image(run.model, attack, x, run.data.num_classes, one_pass)
        times[name] = AttackTime(seconds=seconds, bound=bound)
    return times


def _seconds_of_a_pass(request: Request) -> float:
    """About the time of a forward pass of one image, to choose how much to measure."""
    noise = request.sizes.noise(2, 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build.build(request.recipe.model, noise, None).to(device)
    x = noise.train.images.to(device).float().div(255)
    times = []
    with torch.no_grad():
        for _ in range(3):
            began = time.perf_counter()
            float(model(x).sum())
            times.append((time.perf_counter() - began) / 2)
    return min(times)


def _passes(objective: dict[str, Any]) -> float:
    """About how many forward passes a step takes for an image; a backward pass counts as one or two."""
    trained = objectives.made(objective)
    return trained.replays * (2 * getattr(trained, "steps", 0) + (6 if hasattr(trained, "beta") else 3))


# The time of an attack. An attack in steps drops an image as soon as it is fooled, so its time depends on how robust
# the network is. It is measured inside a tiny ball that fools nothing: that is the longest that an image can take.


class _Enough(Exception):
    """Enough steps were timed."""


def seconds_an_image(model: nn.Module, attack: Any, x: Tensor, classes: int, one_pass: float) -> tuple[float, bool]:
    """The seconds that an attack takes for an image, and whether fooled images take less.

    `one_pass` is the time of a forward pass of one image: a long attack is measured by fewer steps.
    """
    y = predicted(model, x)
    if attack is None:
        return _timed(lambda: predicted(model, x)) / len(x), False
    stepwise = runner.parts(attack, classes)
    if stepwise:
        return sum(_stepwise(model, part, x, y, classes) for part in stepwise), True
    restarts, steps = getattr(attack, "restarts", 1), getattr(attack, "steps", 1)
    if steps <= 3 or 3 * one_pass * restarts * steps * len(x) < 1.0:
        return _timed(lambda: attack(model, x, y)) / len(x), restarts > 1
    once = {"restarts": 1} if hasattr(attack, "restarts") else {}
    one, three = (_timed(partial(replace(attack, steps=n, **once), model, x, y)) for n in (1, 3))
    return restarts * (one + (steps - 1) * max(0.0, three - one) / 2) / len(x), restarts > 1


def _timed(work: Callable[[], object]) -> float:
    """The seconds of the second call: the first one warms up."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _stepwise(model: nn.Module, part: Stepwise, x: Tensor, y: Tensor, classes: int) -> float:
    """The seconds of an image that is never fooled: the time of a step, times the most steps."""
    tiny: Stepwise = replace(part, epsilon=_TINY)  # type: ignore[type-var]  # all of them are dataclasses
    stamps: list[float] = []

    def after_step() -> None:
        stamps.append(time.perf_counter())
        if len(stamps) > _TIMED_STEPS + 1:
            raise _Enough

    with torch.inference_mode(False), torch.no_grad(), frozen(model, x, fast=part.fast) as net:
        packing = Packing(tiny, net, x, y, batch=len(x), seed=0)
        stamps.append(time.perf_counter())
        with suppress(_Enough):
            packing.run(after_step)
    times = [later - earlier for earlier, later in pairwise(stamps)][1:]  # the first one warms up
    return part.longest(classes) * statistics.median(times) / len(x) if times else 0.0


if __name__ == "__main__":
    print(measure(Request.model_validate_json(sys.stdin.read())).model_dump_json())
