"""The artefact: a finished network on disk, its masks, and what it says of itself.

model.safetensors   the network's tensors; small ones where channels were cut out
masks.safetensors   which weights live, in the shapes of the network before any cut
slim.json           what was cut out: with it, the architecture takes the small tensors
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from harp.errors import BudgetError
from harp.models.weights import load_weights, save_model
from harp.pruning import masks
from harp.pruning.channels import Cut, attention, rebuild
from harp.pruning.masks import Masks
from harp.pruning.units import Units, exact
from harp.system import files

SLIM = "slim.json"


def save(
    folder: Path,
    model: nn.Module,
    answer: Masks | None,
    total: int | None,
    units: Units | None = None,
    cut: Cut | None = None,
) -> None:
    """Write the network and its masks, after checking once more that the budget (if there is one) is met.

    It is met exactly where it counts the units themselves; without `units` those are single weights. A network that
    channels were cut out of comes with the `cut`.
    """
    if answer is not None:
        spent = masks.kept(answer) if units is None else units.spent(answer)
        strays = 0 if cut is not None else outside(model, answer)
        total = spent if total is None else total
        is_met = spent == total if units is None or exact(units) else spent <= total
        if not is_met or strays:
            noun = "weights" if units is None else units.noun
            raise BudgetError(
                f"{spent:,} {noun} kept and {strays:,} weights outside the masks, but the budget is {total:,}"
            )
        masks.save(folder / "masks.safetensors", answer)
    if cut is not None:
        files.write_json(folder / SLIM, cut.as_dict())
    save_model(folder / "model.safetensors", model)


def load(folder: Path, model: nn.Module) -> None:
    """Give an architecture the weights of a folder, after cutting out of it what was cut out of them."""
    cut = cut_of(folder)
    if cut is not None:
        cut.apply(model)
    load_weights(model, folder / "model.safetensors")


def export(folder: Path, model: nn.Module, cut: Cut) -> None:
    """Write a smaller network with all that it takes to load it elsewhere, without this package."""
    save_model(folder / "model.safetensors", model)
    files.write_json(folder / SLIM, cut.as_dict())
    for source in (rebuild, attention) if cut.swapped else (rebuild,):
        files.write_text(folder / f"{source.__name__.rpartition('.')[2]}.py", inspect.getsource(source))


def cut_of(folder: Path) -> Cut | None:
    """What was cut out of a folder's network; None if nothing was."""
    path = folder / SLIM
    return Cut.from_dict(files.read_json(path)) if path.is_file() else None


def widened(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A folder's tensors in the shapes that they had before channels were cut out, which are zero there.

    The variances of norms are one there, so that nothing becomes infinite; nobody reads these channels.
    """
    cut = cut_of(folder)
    return dict(tensors) if cut is None else {name: cut.widen(name, tensor) for name, tensor in tensors.items()}


def outside(model: nn.Module, answer: Masks) -> int:
    """How many weights live outside the masks: none, ever."""
    parameters = dict(model.named_parameters())
    return sum(int(parameters[n][~mask.to(parameters[n].device)].count_nonzero()) for n, mask in answer.items())


def budget(units: Units, answer: Masks | None, total: int | None) -> dict[str, Any]:
    """What the budget counts, how much of it is spent, and how much the whole network would."""
    spent = units.size if answer is None else units.spent(answer)
    return {"kind": units.kind, "unit": units.noun, "size": units.size, "total": total, "kept": spent}


def layers(units: Units, answer: Masks | None) -> list[dict[str, Any]]:
    """Name, size and kept units of every layer."""
    kept = units.sizes if answer is None else _kept(units, answer)
    return [{"name": n, "size": s, "kept": k} for n, s, k in zip(units.names, units.sizes, kept, strict=True)]


def _kept(units: Units, answer: Masks) -> list[int]:
    """How many units of each layer live: those that keep anything of what they mask."""
    entries = units.gather([answer[name].to(w.dtype) for name, w in zip(units.masked, units.weights, strict=True)])
    return [0 if living is None else int(living.count_nonzero()) for living in entries]
