"""What is exported: a run's network, or any model with its weights."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp import artefact, assess, data, evaluate, finished, masks, models, recipe, summary
from harp.answers import as_input
from harp.attacks import Ball
from harp.channels import Cut
from harp.channels.dead import remove_dead
from harp.display import Quiet
from harp.errors import DataError, ModelError, RecipeError
from harp.finished import Finished
from harp.masks import Masks
from harp.seeds import derive

_RANDOM, _REAL = 16, 48  # images of noise and of the data set that an export is checked on


@dataclass(frozen=True)
class Subject:
    """A network in eval mode with all that its files say of it.

    Attributes:
        name: of the run's folder, or of the model.
        part: the architecture, before any cut.
        model: the network; what its masks exclude is zero, and channels that a run cut out are gone.
        masks: which of its weights are kept; none for a network that was not pruned weight by weight.
        cut: what a run cut out.
        dense_bytes: of the whole architecture's tensors.
        source: the data set, where it is at hand.
        run: the run, if it is one.
    """

    name: str
    part: recipe.Model
    model: nn.Module
    masks: Masks
    cut: Cut | None
    dense_bytes: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    source: data.DataSet | None
    threat: Ball
    run: Finished | None = None

    @property
    def seed(self) -> int:
        """The run's seed."""
        return 0 if self.run is None else self.run.recipe.seed

    @property
    def examples(self) -> int | None:
        """How many test images the run's evaluation takes; None for all."""
        return None if self.run is None else self.run.recipe.evaluate.examples

    def images(self) -> Tensor:
        """What an export is checked on: noise, and images of the test set where there are any."""
        generator = torch.Generator().manual_seed(derive(self.seed, "export"))
        noise = torch.rand(_RANDOM, *self.shape, generator=generator)
        if self.source is None:
            return noise
        test = self.source.test
        chosen = test.select(evaluate.subset(len(test), _REAL, self.seed)).images[:]
        return torch.cat([noise, as_input(chosen, noise)])

    def small(self) -> tuple[nn.Module, str]:
        """The network without the channels that change no answer, and what went, in words."""
        if self.cut is not None:
            return self.model, "channels, pruned by the run"
        if not self.masks and all(bool(p.all()) for p in self.model.parameters() if p.ndim > 1):
            return self.model, ""
        removed = remove_dead(self.model, self.images()[:2], self.masks or None)
        before, after = removed.parameters
        words = f"{before - after} of {before} parameters, of channels that change no answer"
        return removed.model.eval(), words if after < before else ""

    def facts(self) -> dict[str, Any]:
        """What a manifest says of the network: architecture, budget, accuracy."""
        normalise = self.part.normalize
        return {
            "architecture": {"name": self.part.name, "options": self.part.options},
            "input_shape": list(self.shape),
            "classes": list(self.classes),
            "normalisation": None if normalise is None else {"mean": list(normalise[0]), "std": list(normalise[1])},
            "budget": self._budget(),
            "accuracy": [] if self.run is None else [_accuracy(result) for result in self.run.results],
        }

    def _budget(self) -> dict[str, Any]:
        if self.run is None:
            weights = {name: p for name, p in self.model.named_parameters() if p.ndim > 1}
            layers = [{"name": n, "size": p.numel(), "kept": int(p.count_nonzero())} for n, p in weights.items()]
            found = summary.budget({"layers": layers})
        else:
            layers = [{key: layer[key] for key in ("name", "size", "kept")} for layer in self.run.summary["layers"]]
            found = summary.budget(self.run.summary)
        return {**{key: found[key] for key in ("kind", "unit", "size", "kept")}, "layers": layers}


def of(
    target: str, data_name: str | None, data_dir: Path | None, weights: Path | None, display: Quiet, *, needs_data: bool
) -> Subject:
    """The subject of a run's folder, or of a model and a data set as `harp evaluate` takes them."""
    if Path(target).is_dir():
        if weights is not None or data_name is not None:
            raise RecipeError("--weights and --data are for models: a run has its own")
        return _of_run(Path(target), data_dir, display, needs_data)
    found = assess.load(target, data_name, data_dir, None if weights is None else str(weights))
    if weights is None:
        display.note("no --weights: the network is exported as its code makes it")
    source = found.data
    model = found.model.eval()
    zeros = {n: p.detach() != 0 for n, p in model.named_parameters() if p.ndim > 1 and not bool(p.all())}
    part = recipe.Model(name=target)
    return Subject(
        Path(target).name, part, model, zeros, None, _bytes(model), source.shape, source.classes, source, found.threat
    )


def _of_run(folder: Path, data_dir: Path | None, display: Quiet, needs_data: bool) -> Subject:
    run = finished.read(folder)
    made = run.recipe
    source = None
    try:
        source = data.load(made.data.name, data_dir, **made.data.loading())
    except DataError as error:
        if needs_data:
            raise
        display.note(f"checked on noise only, the data set is not here: {error}")
    shape = run.shape if source is None else source.shape
    if shape is None:
        raise RecipeError(f"{folder} does not say the shape of its images: add --data-dir with its data set")
    whole = models.build(
        made.model.name, num_classes=run.classes, shape=shape, normalize=made.model.normalize, **made.model.options
    )
    model = copy.deepcopy(whole)
    artefact.load(folder, model)
    cut = artefact.cut_of(folder)
    kept: Masks = {}
    if cut is None and (folder / "masks.safetensors").is_file():
        kept = masks.load(folder / "masks.safetensors")
        masks.apply(model, kept)
    _check_finite(folder, model)
    name = folder.resolve().name
    return Subject(
        name,
        made.model,
        model.eval(),
        kept,
        cut,
        _bytes(whole),
        shape,
        run.class_names,
        source,
        assess.threat(made),
        run,
    )


def _check_finite(folder: Path, model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{folder}: {name!r} holds NaN or infinity, the training has diverged")


def _bytes(model: nn.Module) -> int:
    """Of all tensors as they are, each once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _accuracy(result: Mapping[str, Any]) -> dict[str, Any]:
    attack = result.get("attack") or {}
    known = {
        key: result[key] for key in ("name", "value", "low", "high", "n", "seed", "data", "measure") if key in result
    }
    return known | {key: attack[key] for key in ("epsilon", "norm") if key in attack}
