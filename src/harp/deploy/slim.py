"""Make a network's tensors smaller by cutting out channels.

A run that pruned channels already has a small network. A run that pruned weights may have dead channels, which are
removed without changing the logits. Any other model can lose its weakest channels, which does change them.
"""

import copy
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp.errors import ModelError, RecipeError
from harp.experiments import artefact, plan, run_folder
from harp.pruning import macs, masks
from harp.pruning.channels import Channels, Cut
from harp.pruning.channels.removal import remove_dead
from harp.pruning.channels.verify import difference
from harp.pruning.methods import Magnitude


@dataclass(frozen=True)
class Shrunk:
    """A smaller network, the architecture before the cut, and the cut."""

    architecture: nn.Module
    model: nn.Module
    cut: Cut
    example: Tensor
    removed: str  # what was removed, and why

    def facts(self) -> dict[str, Any]:
        """The cost of the network before and after, and the shapes of every tensor that shrank."""
        shape = tuple(self.example.shape[1:])
        before, after = (macs.cost(net, shape, {}) for net in (self.architecture, self.model))
        own = dict(self.model.named_parameters())
        shapes = {n: [s, list(own[n].shape)] for n, s in self.cut.shapes.items() if n in own}
        keys = ("parameters", "macs", "bytes_dense")
        return {"removed": self.removed, **{key: [before[key], after[key]] for key in keys}, "shapes": shapes}

    def save(self, folder: Path) -> None:
        """Write the network, load it with the `rebuild.py` beside it, and compare the logits."""
        check_free(folder)
        artefact.export(folder, self.model, self.cut)
        rebuild = runpy.run_path(str(folder / "rebuild.py"))["rebuild"]
        rebuilt = rebuild(copy.deepcopy(self.architecture)).eval()
        with torch.no_grad():
            gap = difference(rebuilt(self.example), self.model.eval()(self.example))
        if gap:
            raise ModelError(f"{folder}: the logits of the written network differ by {gap:.1e}, not by 0")


def check_free(folder: Path) -> None:
    """Refuse a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder} is not empty: give a folder that is not there yet")


def of_run(folder: Path, shape: str | None = None) -> Shrunk:
    """The smaller network of a finished run."""
    run = run_folder.read(folder)
    network = run.network(None if shape is None else plan.parse_shape(shape))
    example = torch.rand(2, *network.shape, generator=torch.Generator().manual_seed(0))
    if network.cut is None:
        return without_dead_channels(network.model, example, network.masks or None)
    channels = sum(layer["size"] - layer["kept"] for layer in run.summary["layers"])
    return Shrunk(network.architecture, network.model, network.cut, example, f"{channels} channels, pruned by the run")


def without_dead_channels(model: nn.Module, example: Tensor, pruned: masks.Masks | None = None) -> Shrunk:
    """The network without dead channels; its logits stay the same."""
    removed = remove_dead(model.eval(), example, pruned)
    counts = {
        "that nobody reads": removed.unread.channels,
        "that are zero": removed.zero.channels,
        "that are constant": removed.folded.channels + removed.merged.channels,
    }
    texts = [f"{count} channels {why}" for why, count in counts.items() if count]
    return Shrunk(model, removed.model, removed.cut, example, ", ".join(texts) or "nothing: no channel is dead")


def by_magnitude(model: nn.Module, example: Tensor, keep: float, **options: Any) -> Shrunk:
    """The network without its weakest channels, not fine-tuned: its logits change."""
    units = Channels(model.eval(), example, **options)
    pruned = Magnitude(units, keep).finish()
    total = sum(units.sizes)
    weakest = total - sum(int(alive.sum()) for alive in units.alive(pruned))
    text = f"{weakest} of {total} channels, the weakest; answers change: fine-tune it"
    return Shrunk(model, units.slim(model, pruned), units.cut(pruned), example, text)
