"""Reading runs for a report: what `harp run` left in a folder, and what was measured later.

Paths of the machine that a run was made on are removed here, so nothing that is made of a `Run` can show them.
"""

import base64
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harp.data.registry import DATASETS
from harp.errors import RecipeError
from harp.evaluation import accuracy_drop
from harp.experiments import run_folder
from harp.experiments.records import KINDS, Accuracy, Deployed, Examples, Flips, Record, StageFile, Summary, Trial

_IGNORED = {"radius"}  # the single points of a curve, which has them all
_IMAGES = ("image", "attacked")  # keys of base64 text, which may look like a path
_PATH = re.compile(r"(?<![\w.:/\\])(?:file://|~|[A-Za-z]:)?[/\\][\w.@+\-]+(?:[/\\][\w.@+\-]+)+")
_WHOLE_PATH = re.compile(r"^(?:file://)?(?:~|[A-Za-z]:)?[/\\][^;]*[/\\][^;]*$")
Kind = TypeVar("Kind", bound=Record)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    recipe: dict[str, Any]
    summary: Summary
    stages: dict[str, StageFile | None]  # by the names of their folders, which are the same for stages that runs share
    records: list[Record]  # of the evaluation
    unknown: list[str]  # files of the evaluation that this version can't show
    seed: int
    data: str  # the name of the data set
    model: str  # and of the model
    class_names: tuple[str, ...]  # of the data set; empty if it is not known here
    kind: str  # what was pruned: weights or channels
    unit: str  # what the budget counts, in words that distinguish channels from weights
    size: int  # what the budget counts, of the whole network
    kept: int  # and of the pruned one

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The records of a kind; if the same was measured several times, that on most images, or the last."""
        records = [record for record in self.records if isinstance(record, kind)]
        keys = ("name", "attack", "norm", "epsilon")
        return _on_most_images(records, lambda record: tuple(str(getattr(record, key, "")) for key in keys))

    @property
    def results(self) -> list[Accuracy]:
        """All accuracies, each on most images."""
        return _on_most_images([*self.summary.results, *self.of(Accuracy)], lambda result: result.key)

    @property
    def remark(self) -> str:
        """Why it must not look like any other run; empty if it may."""
        results, dense = ([one.model_dump() for one in some] for some in (self.summary.results, self.summary.dense))
        return accuracy_drop.remark(results, dense)

    @property
    def deployed(self) -> list[Deployed]:
        """What was found of each file, by name; of a file that was replaced, only what was found of the last one."""
        by_file: dict[str, list[Deployed]] = {}
        for record in self.records:
            if isinstance(record, Deployed):
                by_file.setdefault(record.artefact.file, []).append(record)
        merged = []
        for records in by_file.values():
            last = records[-1]
            tests: dict[Hashable, Trial] = {}
            for test in (t for one in records if one.artefact.sha256 == last.artefact.sha256 for t in one.tests):
                old, new = tests.get(test.deployed.key), test.deployed
                # Of two worst cases on the same images, the lower one is of more or stronger attacks.
                lower = old is not None and (test.how != "union" or new.value <= old.deployed.value)
                if old is None or new.n > old.deployed.n or (new.n == old.deployed.n and lower):
                    tests[new.key] = test
            merged.append(last.model_copy(update={"tests": list(tests.values())}))
        return merged

    @property
    def classes(self) -> list[str]:
        """The names of the classes, if the data set is known or some file has them."""
        if self.class_names:
            return list(self.class_names)
        records: list[Accuracy | Flips | Examples] = [*self.of(Accuracy), *self.of(Flips), *self.of(Examples)]
        return next((record.classes for record in records if record.classes), [])


def _on_most_images(records: Iterable[Kind], key: Callable[[Kind], Hashable]) -> list[Kind]:
    best: dict[Hashable, Kind] = {}
    for record in records:
        old = best.get(key(record))
        if old is None or (getattr(record, "n", 0) or 0) >= (getattr(old, "n", 0) or 0):
            best[key(record)] = record
    return list(best.values())


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs of the folders, each once."""
    if not folders:
        raise RecipeError("there is no run to report on: give folders that `harp run` made")
    return [_read_run(folder) for folder in {Path(folder).resolve(): Path(folder) for folder in folders}.values()]


def _read_run(folder: Path) -> Run:
    run = run_folder.read(folder, weights=False)
    records, unknown = [], []
    later = {**run.evaluation, **run.deployed}
    for path in sorted(later, key=lambda file: (file.stat().st_mtime_ns, file.name)):
        kind = later[path].get("kind")
        if kind in KINDS:
            records.append(KINDS[kind].model_validate(without_paths(later[path])))
        elif kind not in _IGNORED:
            unknown.append(path.name)
    stages = {
        stage.folder.name: None if stage.facts is None else StageFile.model_validate(without_paths(stage.facts))
        for stage in run.stages
    }
    recipe, summary = without_paths(run.content), Summary.model_validate(without_paths(run.summary))
    seed, data, budget = recipe.get("seed", 0), _name(recipe.get("data")), run_folder.budget_of(run.summary)
    kind, unit = budget["kind"], budget["unit"]
    return Run(
        folder.resolve(),
        recipe,
        summary,
        stages,
        records,
        unknown,
        seed=seed if isinstance(seed, int) else 0,
        data=data,
        model=_name(recipe.get("model")),
        class_names=tuple(map(str, getattr(DATASETS.get(data), "classes", ()) or _noted_classes(run.summary))),
        kind=kind,
        unit=f"{unit} (channels)" if kind == "channels" and unit == "MACs" else unit,
        size=budget["size"],
        kept=budget["kept"],
    )


def _noted_classes(summary: Mapping[str, Any]) -> Sequence[object]:
    """The names of the classes that the run noted of its data; older runs noted none."""
    noted = summary.get("data")
    names = noted.get("classes") if isinstance(noted, dict) else None
    return names if isinstance(names, list) else ()


def _name(part: object) -> str:
    """The name in a part of a recipe, which may be written without its key."""
    return str(part.get("name", "") if isinstance(part, dict) else part or "")


def without_paths(value: Any) -> Any:
    """Plain data without the folders of a machine: only the last part of an absolute path is left."""
    if isinstance(value, dict):
        return {key: item if key in _IMAGES else without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    parts = value.split(";")
    return ";".join(
        _last(part) if _WHOLE_PATH.match(part) else _PATH.sub(lambda m: _last(m[0]), part) for part in parts
    )


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def pixels(text: str, shape: tuple[int, int, int], what: str) -> NDArray[np.uint8]:
    """An image of bytes that come channel after channel."""
    if min(shape) < 1:
        raise RecipeError(f"{what}: an image can't have the shape {shape}")
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RecipeError(f"{what}: the image is not base64 text") from error
    if len(content) != math.prod(shape):
        raise RecipeError(f"{what}: the image has {len(content)} bytes, but its shape {shape} needs {math.prod(shape)}")
    return np.frombuffer(content, np.uint8).reshape(shape)
