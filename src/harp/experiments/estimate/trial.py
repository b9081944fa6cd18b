"""A recipe on noise: the real run, with data that is made up, few steps, and a watch on them."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from harp.evaluation import runner
from harp.experiments import recipe
from harp.experiments.estimate.counting import Counter, densely
from harp.experiments.estimate.known import Sizes
from harp.experiments.recipe import Recipe
from harp.experiments.run import Run
from harp.system.progress import Quiet

_OF_FILES = ("size", "stream", "crop", "margin", "corrupt")  # what a recipe says of files, and noise has none


class Stopwatch(Quiet):
    """Notes when the steps of one training and its epoch ended."""

    def __init__(self, name: str, counter: Counter | None = None) -> None:
        self.name, self.on, self.counter = name, False, counter
        self.stamps: list[float] = []
        self.busy: list[float] = []  # processor time at the stamps
        self.ended = 0.0
        self.state_bytes = 0
        self.operations: list[int] = []  # all that were counted by the end of each step
        self.folder: Path | None = None

    @contextmanager
    def training(self, name: str, epochs: int, steps: int, first: int = 0) -> Iterator[None]:
        """Begin with the training that is to be timed."""
        self.on = name == self.name
        if self.on:
            self.stamps, self.busy = [time.perf_counter()], [time.process_time()]
        yield
        if self.on and self.folder is not None:
            files = [path for path in self.folder.glob("state*") if path.is_file()]
            self.state_bytes = max((path.stat().st_size for path in files), default=0)
        self.on = False

    def step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        if self.on:
            self.stamps.append(time.perf_counter())
            self.busy.append(time.process_time())
            self.operations.append(self.counter.total if self.counter is not None else 0)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """The epoch has ended."""
        if self.on:
            self.ended = time.perf_counter()

    def seconds(self) -> list[float]:
        """Of each step."""
        return [later - earlier for earlier, later in pairwise(self.stamps)]

    def share(self) -> float:
        """The part of the time that the threads were really computing: less than one where others want the cores."""
        waited = self.stamps[-1] - self.stamps[0]
        return (self.busy[-1] - self.busy[0]) / waited / torch.get_num_threads() if waited else 1.0


class Timed(Run):
    """A run that notes how long its validation takes, or leaves it out."""

    validates = True
    validating = 0.0

    def validate(self, objective: Any) -> dict[str, float]:
        """As it is done after every epoch."""
        if not self.validates:
            return {"natural": 0.0, "robust": 0.0}
        began = time.perf_counter()
        found = super().validate(objective)
        self.validating = time.perf_counter() - began
        return found


class Untested(Timed):
    """One that leaves validation out: what it takes is not asked."""

    validates = False


def run_of(
    kind: type[Timed],
    made: Recipe,
    number: int,
    sizes: Sizes,
    *,
    batch: int,
    steps: int,
    held: int,
    root: Path,
    watch: Stopwatch,
    whole: bool = False,
    objective: Mapping[str, Any] | None = None,
) -> Timed:
    """The recipe on noise: one epoch of so many steps in the stage of interest, none in the others.

    A `whole` batch is that of a process, which is split as the recipe says; a smaller one stays in one part.
    """
    content = made.model_dump(mode="json", exclude_defaults=True)
    kept = {key: value for key, value in content["data"].items() if key not in _OF_FILES}
    content["data"] = {**kept, "batch": batch, "holdout": held, "train": None}
    for position, stage in enumerate(content["stages"]):
        stage["epochs"] = min(1, stage["epochs"]) if position == number else 0
        if position < number and stage["pruner"]["name"] not in ("dense", "fixed"):
            stage["pruner"] = _at_once(stage["pruner"], made.units.kind)
        if not whole:
            stage["accumulate"] = 1
        if position == number and objective is not None:
            stage["objective"] = dict(objective)
    noise = sizes.noise(batch * steps + held, 2 * runner.BATCH if held > 64 else 2)
    return kind(recipe.parse(content), root, source=noise, display=watch)


def _at_once(pruner: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What prunes to the same budget without any training; where a method learns its rates, at rates of this kind."""
    strategy = pruner.get("strategy", "blend") if kind == "weights" else "uniform"
    return {"name": "magnitude", "keep": pruner["keep"], "strategy": strategy}


def previous(work: Run, number: int) -> Any:
    """The masks that a stage begins with, those before it being done."""
    answer = None
    for earlier, stage in enumerate(work.recipe.stages[:number]):
        answer = work.stage(earlier, stage, answer)
        work.cut_out(answer)
    return answer


def operations_an_image(made: Recipe, number: int, sizes: Sizes) -> float:
    """The floating point operations that a step makes for an image, counted as they are made: with the attack."""
    with tempfile.TemporaryDirectory() as root, densely(), Counter() as counter:
        watch = Stopwatch(made.stages[number].name, counter)
        work = run_of(Untested, made, number, sizes, batch=2, steps=2, held=2, root=Path(root), watch=watch)
        work.stage(number, work.recipe.stages[number], previous(work, number))
    first, second = watch.operations  # the first step also checks the data
    return (second - first) / 2
