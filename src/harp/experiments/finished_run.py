"""A finished run read back from its folder: its recipe, its numbers, and its weights under their masks."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harp import artefact, checkpoint, masks, recipe
from harp.data import DATASETS
from harp.errors import CheckpointError, RecipeError
from harp.files import reason
from harp.recipe import Recipe, Stage

IMAGES = {
    "fashion": ((1, 28, 28), 1_000),
    "digits": ((1, 8, 8), 500),
    "cifar10": ((3, 32, 32), 10_000),
    "cifar100": ((3, 32, 32), 10_000),
    "svhn": ((3, 32, 32), 26_032),
    "fashion-mnist": ((1, 28, 28), 10_000),
    "mnist": ((1, 28, 28), 10_000),
    "imagenet": ((3, 224, 224), 50_000),
    "tiny-imagenet": ((3, 64, 64), 10_000),
}
"""The image shape (channels, height, width), unless a recipe gives a size, and the number of test images."""


@dataclass(frozen=True)
class Finished:
    """What a run left."""

    folder: Path
    recipe: Recipe
    summary: Mapping[str, Any]
    evaluation: tuple[Mapping[str, Any], ...]  # what was measured later, one file each

    @property
    def results(self) -> list[Mapping[str, Any]]:
        """Every accuracy of the finished network: the run's own, then those that were measured later."""
        return [*self.summary["results"], *self.of_kind("accuracy")]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """What was measured later, of one kind."""
        return [found for found in self.evaluation if found["kind"] == kind]

    @property
    def warnings(self) -> list[str]:
        """What a reader has to be warned of, a sentence each; older runs don't say."""
        return list(self.summary.get("warnings", ()))

    @property
    def pruning(self) -> Stage | None:
        """The last stage that prunes; None for a run that is dense to the end."""
        found = [stage for stage in self.recipe.stages if stage.pruner["name"] not in ("dense", "fixed")]
        return found[-1] if found else None

    @property
    def size(self) -> int:
        """What the budget counts (weights, FLOPs, ...) of the whole network."""
        return int(self._budget["size"])

    @property
    def kept(self) -> int:
        """How much of that is kept."""
        return int(self._budget["kept"])

    @property
    def unit(self) -> str:
        """What the budget counts, in words."""
        return str(self._budget["unit"])

    @property
    def _budget(self) -> Mapping[str, Any]:
        layers = self.summary["layers"]
        weights = {key: sum(int(layer[key]) for layer in layers) for key in ("size", "kept")}
        return {"unit": "weights", **weights, **self.summary.get("budget", {})}

    @property
    def data(self) -> str:
        """The name of the data set; of a file its name without the way to it."""
        return Path(self.recipe.data.name).name

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.summary["results"][0]["totals"])

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes are called; numbers where nobody says."""
        told = [found["classes"] for found in self.evaluation if found.get("classes")]
        names = getattr(DATASETS.get(self.recipe.data.name), "classes", ()) or (told[0] if told else ())
        return tuple(map(str, names if len(names) == self.classes else range(self.classes)))

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """The shape of an image (channels, height, width), where the data set or an example says it."""
        if self.data in IMAGES:
            channels, height, width = IMAGES[self.data][0]
            size = self.recipe.data.size
            return (channels, height, width) if size is None else (channels, size, size)
        told = [found["shape"] for found in self.of_kind("examples") if len(found.get("shape", ())) == 3]
        return (int(told[0][0]), int(told[0][1]), int(told[0][2])) if told else None

    def stages(self) -> list[dict[str, Any]]:
        """What each stage wrote of itself; none for a run that was moved away from its stages."""
        paths = [self.folder.parent / str(name) / "stage.json" for name in self.summary.get("stages") or ()]
        return [_json(path) for path in paths if path.is_file()]

    def state(self) -> dict[str, Tensor]:
        """The network's tensors, dense, with what the masks exclude at zero."""
        tensors, _ = checkpoint.load_tensors(self.folder / "model.safetensors")
        tensors = artefact.widened(self.folder, tensors)
        found = masks.load(self.folder / "masks.safetensors") if self.pruning else {}
        for name, mask in found.items():
            if name not in tensors or tensors[name].shape != mask.shape:
                raise CheckpointError(f"{self.folder}: the masks have {name!r}, the model has no such weight")
            tensors[name] = tensors[name].masked_fill(~mask, 0.0)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{self.folder}: {name!r} holds NaN or infinity, the training has diverged")
        return tensors


def read(folder: str | Path) -> Finished:
    """Read the folder that `harp run` made, with what was measured in it later on the same data.

    A folder that is not whole is refused.
    """
    path = Path(folder)
    if not (path / "recipe.yaml").is_file():
        raise RecipeError(f"{folder} is no run: there is no recipe.yaml in it (give a folder that `harp run` made)")
    made = recipe.load(path / "recipe.yaml")
    pruned = any(stage.pruner["name"] != "dense" for stage in made.stages)
    for name in ("summary.json", "model.safetensors", *(["masks.safetensors"] if pruned else [])):
        if not (path / name).is_file():
            raise RecipeError(f"{folder} is not finished: there is no {name} in it (`harp run` again to finish it)")
    summary = _json(path / "summary.json")
    _check_summary(path / "summary.json", summary)
    later = [_measured(file) for file in sorted((path / "evaluation").glob("*.json"))]
    own = summary["results"][0].get("data")
    # Other data than its own, or other weights, may have been evaluated: not what a reader takes the numbers for.
    mine = [found for found in later if found.get("data", own) in (own, None) and _same_network(found, summary)]
    return Finished(path, made, summary, tuple(mine))


def _same_network(found: Mapping[str, Any], summary: Mapping[str, Any]) -> bool:
    """Whether a number is one of the run's network; where one of them does not say, it is taken for that."""
    return None in (found.get("network"), summary.get("network")) or found["network"] == summary["network"]


def plain_correct(result: Mapping[str, Any]) -> tuple[int, int]:
    """How many images were classified correctly, of how many: each image counts the same, whatever its class."""
    return sum(result["correct"]), sum(result["totals"])


def named(found: Finished, name: str, epsilon: float | None = None, norm: str = "linf") -> Mapping[str, Any] | None:
    """The result of an attack at an epsilon, of several the one on the most images; without an epsilon, unattacked."""
    fitting = [result for result in found.results if _fits(result, name, epsilon, norm)]
    return max(fitting, key=lambda result: plain_correct(result)[1]) if fitting else None


def _fits(result: Mapping[str, Any], name: str, epsilon: float | None, norm: str) -> bool:
    attack = result.get("attack") or {}
    if epsilon is None:
        return not attack and result["name"] == name
    same = re.split("[,@]", str(result["name"]))[0] == name or str(attack.get("type", "")).lower() == name
    return same and attack.get("norm", "linf") == norm and abs(attack.get("epsilon", -1) - epsilon) < 1e-6


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _check_summary(path: Path, summary: Mapping[str, Any]) -> None:
    for key, parts in (("results", ("name", "value", "correct", "totals")), ("layers", ("name", "size", "kept"))):
        entries = summary.get(key)
        if not isinstance(entries, list) or not entries:
            raise CheckpointError(f"{path} has no {key!r}: it is not what `harp run` writes")
        for entry in entries:
            _check_parts(path, entry, parts)
    warnings = summary.get("warnings", [])
    if not isinstance(warnings, list) or not all(isinstance(warning, str) for warning in warnings):
        raise CheckpointError(f"{path} has 'warnings' that are no list of sentences: it is damaged")


def _check_parts(path: Path, entry: object, parts: tuple[str, ...]) -> None:
    missing = [part for part in parts if not isinstance(entry, dict) or part not in entry]
    if missing:
        raise CheckpointError(f"{path} has an entry without {missing[0]!r}: it is damaged or of another version")


_PARTS = {
    "accuracy": ("name", "value", "correct", "totals"),
    "distances": ("norm", "values"),
    "checks": ("findings",),
}


def _measured(path: Path) -> dict[str, Any]:
    found = _json(path)
    _check_parts(path, found, ("kind",))
    _check_parts(path, found, _PARTS.get(found["kind"], ()))
    return found
