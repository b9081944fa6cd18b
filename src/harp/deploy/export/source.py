"""What is exported: a run's network, or any model with its weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp import models
from harp.attacks import Ball
from harp.data.registry import DataSet
from harp.errors import DataError, RecipeError
from harp.evaluation import accuracy, score
from harp.evaluation.predict import answer, as_input
from harp.experiments import build, recipe, run_folder
from harp.experiments.run_folder import Finished, LoadedRun, network_of, size_of
from harp.models import has_weights
from harp.models.normalize import constants as read_constants
from harp.pruning.channels import Cut
from harp.pruning.channels.removal import remove_dead
from harp.pruning.masks import Masks
from harp.system import hub
from harp.system.progress import Quiet
from harp.system.seeds import derive

ACCURACY_KEYS = ("name", "value", "low", "high", "n", "seed", "data", "measure")
"""What a manifest says of an accuracy."""

_NOISE, _TEST = 16, 48  # numbers of noise images and test images that an export is checked on


@dataclass(frozen=True)
class Source:
    """A network in eval mode with everything that its manifest states."""

    name: str  # of the run's folder, or of the model
    architecture: recipe.Model  # before any cut
    model: nn.Module  # weights outside its masks are zero, and channels that a run cut out are gone
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    threat: Ball
    data: DataSet | None = None  # if it is available
    run: LoadedRun | None = None  # if the network comes from one

    @cached_property
    def masks(self) -> Masks:
        """The kept weights, by parameter; those of a model are its parameters that hold zeros."""
        if self.run is not None:
            return self.run.masks
        return {n: p.detach() != 0 for n, p in self.model.named_parameters() if p.ndim > 1 and not bool(p.all())}

    @property
    def cut(self) -> Cut | None:
        """The channels that a run cut out."""
        return None if self.run is None else self.run.cut

    @property
    def dense_bytes(self) -> int:
        """The size of all tensors of the whole architecture."""
        return size_of(self.model) if self.run is None else self.run.dense_bytes

    @property
    def seed(self) -> int:
        """The run's seed."""
        return 0 if self.run is None else self.run.recipe.seed

    def images(self) -> Tensor:
        """The images that an export is checked on: noise, and test images if there is a data set."""
        generator = torch.Generator().manual_seed(derive(self.seed, "export"))
        noise = torch.rand(_NOISE, *self.shape, generator=generator)
        if self.data is None:
            return noise
        test = self.data.test
        chosen = test.select(score.subset(len(test), _TEST, self.seed)).images[:]
        return torch.cat([noise, as_input(chosen, noise)])

    def without_dead_channels(self) -> tuple[nn.Module, str]:
        """The network without the channels that do not change its logits, and a text that says what was removed."""
        if self.cut is not None:
            return self.model, "channels, pruned by the run"
        if not self.masks and all(bool(p.all()) for p in self.model.parameters() if p.ndim > 1):
            return self.model, ""
        removed = remove_dead(self.model, self.images()[:2], self.masks or None)
        before, after = removed.parameters
        text = f"{before - after} of {before} parameters, of channels that change no answer"
        return removed.model.eval(), text if after < before else ""

    def facts(self) -> dict[str, Any]:
        """The manifest's entries about the network: architecture, budget, accuracy."""
        normalise = self.architecture.normalize
        return {
            "architecture": {"name": self._model_name(), "options": self.architecture.options},
            "input_shape": list(self.shape),
            "classes": list(self.classes),
            "normalisation": None if normalise is None else {"mean": list(normalise[0]), "std": list(normalise[1])},
            "budget": self._budget(),
            "accuracy": [] if self.run is None else [_accuracy(result) for result in self.run.finished.results],
        }

    def _model_name(self) -> str:
        """The model as it was named, without a place on somebody's disk."""
        name = self.architecture.name if self.run is None else self.run.recipe.model.name
        file = models.source_file(name)
        return Path(name).name if file is not None and Path(file).expanduser().is_absolute() else name

    def _budget(self) -> dict[str, Any]:
        weights = {name: p for name, p in self.model.named_parameters() if p.ndim > 1}
        counts = [{"name": n, "size": p.numel(), "kept": int(p.count_nonzero())} for n, p in weights.items()]
        summary = {"layers": counts} if self.run is None else self.run.summary
        layers = [{key: layer[key] for key in ("name", "size", "kept")} for layer in summary["layers"]]
        budget = run_folder.budget_of(summary)
        return {**{key: budget[key] for key in ("kind", "unit", "size", "kept")}, "layers": layers}


def _accuracy(result: Mapping[str, Any]) -> dict[str, Any]:
    attack = result.get("attack") or {}
    entry = {key: result[key] for key in ACCURACY_KEYS if key in result}
    return entry | {key: attack[key] for key in ("epsilon", "norm") if key in attack}


def of_target(
    target: str,
    data_name: str | None,
    data_dir: Path | None,
    weights: Path | None,
    display: Quiet,
    *,
    needs_data: bool,
    size: int | None = None,
    normalize: str | None = None,
) -> Source:
    """The source that a command names: a run's folder, or a model and a data set as in `harp evaluate`."""
    if Path(target).is_dir() or hub.is_name(target):
        if any(option is not None for option in (weights, data_name, size, normalize)):
            raise RecipeError("--weights, --data, --size and --normalize are for models: a run has its own")
        run = run_folder.read(run_folder.place(target))
        run_data = data_of(run, data_dir, display, needed=needs_data)
        shape = run.shape if run_data is None else run_data.shape
        if shape is None:
            raise RecipeError(f"{target} does not say the shape of its images: add --data-dir with its data set")
        return of_run(network_of(run, shape), run_data)
    given = None if weights is None else str(weights)
    loaded = build.load(target, data_name, data_dir, given, size=size, normalize=normalize)
    if weights is None and not has_weights(target):
        display.note("no --weights: the network is exported as its code makes it")
    data, model = loaded.data, loaded.model.eval()
    constants = None if normalize is None else read_constants(normalize)
    name, architecture = Path(target).name, recipe.Model(name=target, normalize=constants)
    return Source(name, architecture, model, data.shape, data.classes, loaded.threat, data)


def data_of(run: Finished, data_dir: Path | None, display: Quiet, *, needed: bool) -> DataSet | None:
    """The run's data set; without it files are checked on noise only."""
    try:
        return run.load_data(data_dir)
    except DataError as error:
        if needed:
            raise
        display.note(f"checked on noise only, the data set is not here: {error}")
        return None


def of_run(run: LoadedRun, data: DataSet | None) -> Source:
    """The source of a run, with its data set if that is available."""
    name, threat = run.folder.resolve().name, build.threat(run.recipe)
    return Source(name, run.finished.places.model_of(run.recipe), run.model, run.shape, run.classes, threat, data, run)


def of_module(model: nn.Module, shape: tuple[int, int, int], classes: Sequence[str] | None = None) -> Source:
    """The source of a torch module; without names its classes are numbered."""
    model = copy.deepcopy(model).cpu().eval()
    count = answer(model, torch.rand(2, *shape)).shape[1]
    names = tuple(map(str, range(count))) if classes is None else tuple(classes)
    if len(names) != count:
        raise RecipeError(f"{len(names)} names of classes, but the model has {count} logits")
    name = type(model).__name__
    return Source(name, recipe.Model(name=name), model, shape, names, accuracy.DEFAULT)
