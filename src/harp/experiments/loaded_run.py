"""The network of a finished run, ready for use."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harp.data import registry
from harp.errors import ModelError
from harp.experiments import finished_run as finished
from harp.experiments.finished_run import Finished
from harp.experiments.recipe import Recipe
from harp.pruning import masks
from harp.pruning.channels import Cut
from harp.pruning.masks import Masks


@dataclass(frozen=True)
class LoadedRun:
    """The network of a finished run with what the run says of it: `harp.load_run` makes one.

    Arguments:
        model: the network in eval mode. Weights outside its masks are zero; channels that the run cut out are gone.
        masks: the kept weights of each pruned parameter; empty for a dense network and for one with channels cut out.
        cut: what was cut out; None if nothing was.
        shape: channels, height and width of an image.
        dense_bytes: the size of all tensors before pruning.
        finished: everything else that was read from the folder, such as later measurements.

    Example:
        run = harp.load_run("runs/mine-0123456789ab")
        logits = run.model(images)
        print(run.recipe.name, run.summary["results"])
    """

    model: nn.Module
    masks: Masks
    cut: Cut | None
    shape: tuple[int, int, int]
    dense_bytes: int
    finished: Finished

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.finished.folder

    @property
    def recipe(self) -> Recipe:
        """The recipe that was run."""
        return self.finished.recipe

    @property
    def summary(self) -> Mapping[str, Any]:
        """What `summary.json` holds: results, layers, budget, cost, warnings."""
        return self.finished.summary

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.finished.class_names


def load_run(folder: str | Path, *, data_dir: str | Path | None = None) -> LoadedRun:
    """Load the network of a finished run: in eval mode, masks applied and pruned channels cut out.

    Arguments:
        folder: what `harp run` wrote.
        data_dir: where data sets are. It is read only if nothing else says the shape of the images.

    Example:
        run = harp.load_run("runs/mine-0123456789ab")
        logits = run.model(images)
    """
    run = finished.read(folder)
    shape = run.shape
    if shape is None:
        directory = None if data_dir is None else Path(data_dir)
        shape = registry.load(run.recipe.data.name, directory, **run.recipe.data.loading()).shape
    return network_of(run, shape)


def network_of(run: Finished, shape: tuple[int, int, int]) -> LoadedRun:
    """The network of a run for images of a shape."""
    network = run.network(shape)
    model = network.model
    masks.apply(model, network.masks)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{run.folder}: {name!r} holds NaN or infinity, the training has diverged")
    return LoadedRun(model.eval(), network.masks, network.cut, network.shape, size_of(network.architecture), run)


def size_of(model: nn.Module) -> int:
    """The bytes of all tensors of a model, each counted once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
