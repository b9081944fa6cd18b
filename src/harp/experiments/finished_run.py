"""A finished run read back from its folder: its recipe, its numbers, and its weights under their masks."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp.data.registry import DATASETS, facts
from harp.errors import CheckpointError, RecipeError
from harp.experiments import artefact, run_folder
from harp.experiments.recipe import Stage
from harp.experiments.run_folder import RunFolder
from harp.pruning import masks
from harp.pruning.channels import Cut
from harp.pruning.masks import Masks
from harp.system.tensors import load_tensors


@dataclass(frozen=True)
class Network:
    """A run's network, rebuilt."""

    architecture: nn.Module  # before any cut, not trained
    model: nn.Module  # as the run left it, in eval mode
    shape: tuple[int, int, int]  # of an image
    cut: Cut | None  # what the run cut out of the architecture
    masks: Masks  # which single weights are kept; none if channels were cut out


@dataclass(frozen=True)
class Finished(RunFolder):
    """What a run left."""

    @cached_property
    def own(self) -> list[Mapping[str, Any]]:
        """What was measured later of this network on its own data, and not of other weights or on other data."""
        data, network = self.summary["results"][0].get("data"), self.summary.get("network")
        return [  # what does not say is taken for that
            found
            for found in self.evaluation.values()
            if found.get("data") in (data, None) and (network is None or found.get("network") in (network, None))
        ]

    @property
    def results(self) -> list[Mapping[str, Any]]:
        """Every accuracy of the finished network: the run's own, then those that were measured later."""
        return [*self.summary["results"], *self.of_kind("accuracy")]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """What was measured later, of one kind."""
        return [found for found in self.own if found.get("kind") == kind]

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
        return run_folder.budget_of(self.summary)

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
        told = [found["classes"] for found in self.own if found.get("classes")]
        names = getattr(DATASETS.get(self.recipe.data.name), "classes", ()) or (told[0] if told else ())
        return tuple(map(str, names if len(names) == self.classes else range(self.classes)))

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """The shape of an image (channels, height, width), where the data set or an example says it."""
        known, size = facts(self.data), self.recipe.data.size
        if known is not None:
            return known.shape if size is None else (known.shape[0], size, size)
        told = [found["shape"] for found in self.of_kind("examples") if len(found.get("shape", ())) == 3]
        return (int(told[0][0]), int(told[0][1]), int(told[0][2])) if told else None

    def network(
        self,
        shape: tuple[int, int, int] | None = None,
        classes: int | None = None,
        remedy: str = "add --shape, like 3x32x32",
    ) -> Network:
        """The network, rebuilt for its own images or those of another shape and number of classes."""
        shape = shape or self.shape
        if shape is None:
            raise RecipeError(f"{self.folder} does not say the shape of its images: {remedy}")
        architecture = self.recipe.model.build(classes or self.classes, shape).eval()
        model, cut = copy.deepcopy(architecture), artefact.cut_of(self.folder)
        artefact.load(self.folder, model)
        path = self.folder / "masks.safetensors"
        return Network(architecture, model, shape, cut, masks.load(path) if cut is None and path.is_file() else {})

    def state(self) -> dict[str, Tensor]:
        """The network's tensors, dense, with what the masks exclude at zero."""
        tensors, _ = load_tensors(self.folder / "model.safetensors")
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
    return Finished(**vars(run_folder.read(folder)))


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
