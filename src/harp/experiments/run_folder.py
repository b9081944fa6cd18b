"""The one reader of a run's folder: what is missing or damaged is the same error for every command.

RUN/recipe.yaml summary.json model.safetensors masks.safetensors
RUN/evaluation/*.json                      what `harp evaluate` measured
RUN/export/*.evaluation/deployed-*.json    what it measured of exported files
RUN/../stages/<name>/stage.json            unless the run was moved away from its stages
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harp.errors import CheckpointError, RecipeError, RunFolderError
from harp.experiments import recipe
from harp.experiments.recipe import Recipe
from harp.experiments.records import KINDS, Record, StageFile, Summary
from harp.system import files

_FINISH = "`harp run` its recipe again to finish it"
_REWRITE = "`harp run` its recipe again writes it anew"
_RETRAIN = "delete the stage's folder and `harp run` the recipe again"
_MEASURE = "delete it to measure again"


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its folder, and what it wrote of itself; None for a run that was moved away from it."""

    folder: Path
    facts: Mapping[str, Any] | None


@dataclass(frozen=True)
class RunFolder:
    """What a finished run left: its files as they are, checked."""

    folder: Path
    content: Mapping[str, Any]  # of recipe.yaml
    summary: Mapping[str, Any]
    stages: tuple[Stage, ...]
    evaluation: Mapping[Path, Mapping[str, Any]]  # what was measured later
    deployed: Mapping[Path, Mapping[str, Any]]  # and of exported files

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, checked; this version may not know all that another one did."""
        return _parsed(self.folder, self.content)

    def result(self, name: str) -> Mapping[str, Any]:
        """A number of the run's own evaluation."""
        for result in self.summary["results"]:
            if result["name"] == name:
                return dict(result)
        raise RunFolderError(self.folder / "summary.json", f"has no result of {name!r}", _REWRITE)


def read(folder: str | Path, *, weights: bool = True) -> RunFolder:
    """Read the folder of a finished run; its network has to be there too, unless `weights` are not needed."""
    path = Path(folder)
    content = content_of(path)
    network = ["model.safetensors", *(["masks.safetensors"] if any(map(_is_pruned, content["stages"])) else [])]
    for name in ("summary.json", *(network if weights else [])):
        if not (path / name).is_file():
            raise RunFolderError(path, f"is not finished: there is no {name} in it", _FINISH)
    summary = _checked(Summary, path / "summary.json", _REWRITE)
    names = (re.split(r"[/\\]", stage)[-1] for stage in summary.get("stages", ()))
    folders = [path.parent / "stages" / name for name in names]
    stages = tuple(Stage(each, stage_facts(each) if (each / "stage.json").is_file() else None) for each in folders)
    later, deployed = path.glob("evaluation/*.json"), path.glob("export/*.evaluation/deployed-*.json")
    measured = ({file: _checked(None, file, _MEASURE) for file in sorted(paths)} for paths in (later, deployed))
    return RunFolder(path, content, summary, stages, *measured)


def recipe_of(folder: str | Path) -> Recipe:
    """The recipe of a run that need not be finished."""
    return _parsed(Path(folder), content_of(Path(folder)))


def stage_facts(folder: Path) -> dict[str, Any]:
    """What a finished stage wrote of itself."""
    return _checked(StageFile, folder / "stage.json", _RETRAIN)


def content_of(folder: Path) -> dict[str, Any]:
    """The content of a run's recipe."""
    path, remedy = folder / "recipe.yaml", "give a folder that `harp run` made"
    if not folder.is_dir():
        raise RunFolderError(folder, "is no run: there is no such folder", remedy)
    if not path.is_file():
        raise RunFolderError(folder, "is no run: there is no recipe.yaml in it", remedy)
    try:
        content = recipe.read(path, "it")
    except RecipeError as error:
        raise RunFolderError(path, f"is damaged: {error}", _REWRITE) from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
        raise RunFolderError(path, "is no recipe of a run: it has no list of stages", _REWRITE)
    return content


def _parsed(folder: Path, content: Mapping[str, Any]) -> Recipe:
    try:
        return recipe.parse({"name": "recipe", **content})
    except RecipeError as error:
        raise RunFolderError(folder / "recipe.yaml", f"is of no use here: {error}", _REWRITE) from error


def _is_pruned(stage: object) -> bool:
    pruner = stage.get("pruner") if isinstance(stage, dict) else None
    return (pruner.get("name") if isinstance(pruner, dict) else pruner) != "dense"


def _checked(kind: type[Record] | None, path: Path, remedy: str) -> dict[str, Any]:
    """The content of a JSON file, if it is a record of the kind that it is to be, or else says that it is."""
    try:
        content = files.read_json(path)
        (kind or KINDS.get(str(content.get("kind")), Record)).model_validate(content)
    except CheckpointError as error:
        raise RunFolderError(path, str(error).removeprefix(f"{path} "), remedy) from error
    except ValidationError as error:
        first = error.errors()[0]
        where, what = ".".join(str(step) for step in first["loc"]), first["msg"].removeprefix("Value error, ")
        raise RunFolderError(path, f"is damaged: {where}: {what}, not {first['input']!r:.60}", remedy) from error
    return content


def budget_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's budget counts, of which units, and how much of it is kept; runs that don't say it count weights."""
    weights = {key: sum(layer[key] for layer in summary["layers"]) for key in ("size", "kept")}
    return {"kind": "weights", "unit": "weights", **weights, **(summary.get("budget") or {})}
