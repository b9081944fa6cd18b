"""Reading runs for a report: what `harp run` left in a folder, what was measured later, and nothing else.

Whatever is not as it should be is one line of error. Paths of the machine that a run was made on are taken out here,
so nothing that is made of a `Run` can show them.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harp.errors import RecipeError
from harp.experiments import run_folder
from harp.experiments.records import (
    KINDS,
    Accuracy,
    Budget,
    Deployed,
    Examples,
    Flips,
    Record,
    StageFile,
    Summary,
    Trial,
)
from harp.reports.html.paths import without_paths

_PASSED_OVER = {"radius"}  # the single points of a curve, which has them all
Kind = TypeVar("Kind", bound=Record)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    recipe: dict[str, Any]
    summary: Summary
    stages: dict[str, StageFile | None]  # by the names of their folders, which tell stages that runs share
    found: list[Record]
    unknown: list[str]  # files of the evaluation that this version can't show

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.summary.name

    @property
    def seed(self) -> int:
        """The seed that all its random numbers came from."""
        value = self.recipe.get("seed", 0)
        return value if isinstance(value, int) else 0

    @property
    def size(self) -> int:
        """What the budget counts of the whole network."""
        return self.budget.size

    @property
    def kept(self) -> int:
        """What is left of that."""
        return self.budget.kept

    @property
    def budget(self) -> Budget:
        """The budget; a run that says nothing of it counts weights."""
        layers = self.summary.layers
        size, kept = sum(layer.size for layer in layers), sum(layer.kept for layer in layers)
        return self.summary.budget or Budget(size=size, kept=kept)

    @property
    def kind(self) -> str:
        """What was pruned: weights or channels."""
        return self.budget.kind

    @property
    def unit(self) -> str:
        """What the budget counts, in words that tell channels from weights."""
        both = self.kind == "channels" and self.budget.unit == "MACs"
        return f"{self.budget.unit} (channels)" if both else self.budget.unit

    def of(self, kind: type[Kind]) -> list[Kind]:
        """What the evaluation found of a kind; if the same was measured several times, that of most images, or last."""
        best: dict[tuple[object, ...], Kind] = {}
        for record in self.found:
            if isinstance(record, kind):
                name = tuple(str(getattr(record, key, "")) for key in ("name", "attack", "norm", "epsilon"))
                if name not in best or (getattr(record, "n", 0) or 0) >= (getattr(best[name], "n", 0) or 0):
                    best[name] = record
        return list(best.values())

    @property
    def results(self) -> list[Accuracy]:
        """All accuracies: of numbers that were measured the same way, the one of more images."""
        best: dict[Any, Accuracy] = {}
        for result in [*self.summary.results, *self.of(Accuracy)]:
            if result.key not in best or result.n >= best[result.key].n:
                best[result.key] = result
        return list(best.values())

    @property
    def deployed(self) -> list[Deployed]:
        """What was found of each file, by name: of a file that was replaced, what was found of the last one.

        Several evaluations of a file are one: of numbers that were measured the same way, the one of more images.
        """
        by_file: dict[str, list[Deployed]] = {}
        for record in self.found:
            if isinstance(record, Deployed):
                by_file.setdefault(record.artefact.file, []).append(record)
        merged = []
        for records in by_file.values():
            last = records[-1]
            tests: dict[Any, Trial] = {}
            for test in (
                test for each in records if each.artefact.sha256 == last.artefact.sha256 for test in each.tests
            ):
                key, now = test.deployed.key, test.deployed
                old = tests[key].deployed if key in tests else None
                # Of two worst cases the one of more attacks, or stronger ones, is the lower.
                lower = old is not None and (test.how != "union" or now.value <= old.value)
                if old is None or now.n > old.n or (now.n == old.n and lower):
                    tests[key] = test
            merged.append(last.model_copy(update={"tests": list(tests.values())}))
        return merged

    @property
    def data(self) -> str:
        """The name of the data set."""
        part = self.recipe.get("data")
        return str(part.get("name", "")) if isinstance(part, dict) else str(part or "")

    @property
    def classes(self) -> list[str]:
        """The names of the classes, where some file has them."""
        known = [
            *(one.classes for one in self.of(Accuracy)),
            *(one.classes for one in self.of(Flips)),
            *(one.classes for one in self.of(Examples)),
        ]
        return next((names for names in known if names), [])


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs of the folders, each once."""
    if not folders:
        raise RecipeError("there is no run to report on: give folders that `harp run` made")
    once = {Path(folder).resolve(): Path(folder) for folder in folders}
    return [_read_run(folder) for folder in once.values()]


def _read_run(folder: Path) -> Run:
    run = run_folder.read(folder, weights=False)
    found, unknown = [], []
    later = {**run.evaluation, **run.deployed}
    for path in sorted(later, key=lambda file: (file.stat().st_mtime_ns, file.name)):
        kind = later[path].get("kind")
        if kind in KINDS:
            found.append(KINDS[kind].model_validate(without_paths(later[path])))
        elif kind not in _PASSED_OVER:
            unknown.append(path.name)
    stages = {
        stage.folder.name: None if stage.facts is None else StageFile.model_validate(without_paths(stage.facts))
        for stage in run.stages
    }
    summary = Summary.model_validate(without_paths(run.summary))
    return Run(folder.resolve(), without_paths(run.content), summary, stages, found, unknown)


def pixels(text: str, shape: tuple[int, int, int], what: str) -> bytes:
    """The bytes of an image, channel after channel."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecipeError(f"{what}: the image is no base64 text") from error
    if len(content) != math.prod(shape):
        raise RecipeError(f"{what}: the image has {len(content)} bytes, but its shape {shape} needs {math.prod(shape)}")
    return content
