"""Making a network's tensors smaller: what nobody reads is cut out, and the answers stay what they are.

Of a run that pruned channels the small network is there already; of one that pruned weights the channels are found
that died along the way; and any other model can lose its weakest channels on the spot.
"""

import copy
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp import artefact, cost, finished, masks, models, survey
from harp.channels import Channels, Cut
from harp.channels.dead import remove_dead
from harp.channels.trial import difference
from harp.errors import ModelError, RecipeError
from harp.pruners import Magnitude


@dataclass(frozen=True)
class Shrunk:
    """A smaller network, what it was cut out of, and what was cut."""

    architecture: nn.Module
    model: nn.Module
    cut: Cut
    example: Tensor
    words: str  # what went, and why

    def facts(self) -> dict[str, Any]:
        """What the network costs before and after, and every tensor that shrank."""
        shape = tuple(self.example.shape[1:])
        before, after = (cost.cost(net, shape, {}) for net in (self.architecture, self.model))
        own = dict(self.model.named_parameters())
        shapes = {n: [s, list(own[n].shape)] for n, s in self.cut.shapes.items() if n in own}
        keys = ("parameters", "macs", "bytes_dense")
        return {"removed": self.words, **{key: [before[key], after[key]] for key in keys}, "shapes": shapes}

    def save(self, folder: Path) -> None:
        """Write the network, load it again by the file that goes with it, and compare the answers."""
        check_free(folder)
        artefact.export(folder, self.model, self.cut)
        spec = importlib.util.spec_from_file_location("rebuild", folder / "rebuild.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        again = module.rebuild(copy.deepcopy(self.architecture)).eval()
        with torch.no_grad():
            gap = difference(again(self.example), self.model.eval()(self.example))
        if gap:
            raise ModelError(f"{folder}: the network that was written answers otherwise ({gap:.1e})")


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder} is not empty: give a folder that is not there yet")


def of_run(folder: Path, shape: str | None = None) -> Shrunk:
    """The smaller network of a finished run."""
    found = finished.read(folder)
    size = survey.parse_shape(shape) if shape is not None else found.shape
    if size is None:
        raise RecipeError(f"{folder} does not say the shape of its images: add --shape, like 3x32x32")
    part = found.recipe.model
    architecture = models.build(
        part.name, num_classes=found.classes, shape=size, normalize=part.normalize, **part.options
    ).eval()
    example = torch.rand(2, *size, generator=torch.Generator().manual_seed(0))
    cut = artefact.cut_of(folder)
    small = copy.deepcopy(architecture)
    artefact.load(folder, small)
    if cut is not None:
        channels = sum(layer["size"] - layer["kept"] for layer in found.summary["layers"])
        return Shrunk(architecture, small, cut, example, f"{channels} channels, pruned by the run")
    path = folder / "masks.safetensors"
    return of_dead(small, example, masks.load(path) if path.is_file() else None)


def of_dead(model: nn.Module, example: Tensor, pruned: masks.Masks | None = None) -> Shrunk:
    """The network without the channels that don't change any answer."""
    removed = remove_dead(model.eval(), example, pruned)
    gone = {
        "that nobody reads": removed.unread.channels,
        "that are zero": removed.zero.channels,
        "that are constant": removed.folded.channels + removed.merged.channels,
    }
    words = (
        ", ".join(f"{count} channels {why}" for why, count in gone.items() if count) or "nothing: no channel is dead"
    )
    return Shrunk(model, removed.model, removed.cut, example, words)


def by_magnitude(model: nn.Module, example: Tensor, keep: float, **options: Any) -> Shrunk:
    """The network without its weakest channels, untrained: its answers change, and fine-tuning is up to you."""
    units = Channels(model.eval(), example, **options)
    pruned = Magnitude(units, keep).finish()
    counts = [int(alive.sum()) for alive in units.alive(pruned)]
    words = (
        f"{sum(units.sizes) - sum(counts)} of {sum(units.sizes)} channels, the weakest; answers change: fine-tune it"
    )
    return Shrunk(model, units.slim(model, pruned), units.cut(pruned), example, words)
