"""The files of a finished network.

model.safetensors   its tensors, smaller where channels were cut out
masks.safetensors   the kept weights, in the shapes of the network before any cut
slim.json           the channels that were cut out: without them the architecture fits the tensors
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
    folder: Path, model: nn.Module, answer: Masks | None, total: int | None, units: Units, cut: Cut | None = None
) -> None:
    """Write a network and its masks, after a check that the budget is met; `cut` are the channels that are cut out.

    A budget that counts units is met exactly, another one is not exceeded.
    """
    if answer is not None:
        spent, strays = units.spent(answer), 0 if cut is not None else outside(model, answer)
        total = spent if total is None else total
        if strays or spent > total or (spent < total and exact(units)):
            kept = f"{spent:,} {units.noun} kept"
            raise BudgetError(f"{kept} and {strays:,} weights outside the masks, but the budget is {total:,}")
        masks.save(folder / "masks.safetensors", answer)
    if cut is not None:
        files.write_json(folder / SLIM, cut.as_dict())
    save_model(folder / "model.safetensors", model)


def load(folder: Path, model: nn.Module) -> None:
    """Load the weights of a folder into an architecture, after cutting out the channels that they don't have."""
    cut = cut_of(folder)
    if cut is not None:
        cut.apply(model)
    load_weights(model, folder / "model.safetensors")


def export(folder: Path, model: nn.Module, cut: Cut) -> None:
    """Write a smaller network with the source that loads it without this package."""
    save_model(folder / "model.safetensors", model)
    files.write_json(folder / SLIM, cut.as_dict())
    for source in (rebuild, attention) if cut.swapped else (rebuild,):
        files.write_text(folder / f"{source.__name__.rpartition('.')[2]}.py", inspect.getsource(source))


def cut_of(folder: Path) -> Cut | None:
    """The channels that were cut out of a folder's network; None if there are none."""
    path = folder / SLIM
    return Cut.from_dict(files.read_json(path)) if path.is_file() else None


def widened(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A folder's tensors in their shapes before the cut: zero there, or one in the variances of norms."""
    cut = cut_of(folder)
    return dict(tensors) if cut is None else {name: cut.widen(name, tensor) for name, tensor in tensors.items()}


def outside(model: nn.Module, answer: Masks) -> int:
    """The number of weights outside the masks that are not zero; it must be 0."""
    parameters = dict(model.named_parameters())
    return sum(int(parameters[n][~mask.to(parameters[n].device)].count_nonzero()) for n, mask in answer.items())


def budget(units: Units, answer: Masks | None, total: int | None) -> dict[str, Any]:
    """The budget: what it counts, of the whole network, as a limit, and of what is kept."""
    spent = units.size if answer is None else units.spent(answer)
    return {"kind": units.kind, "unit": units.noun, "size": units.size, "total": total, "kept": spent}


def layers(units: Units, answer: Masks | None) -> list[dict[str, Any]]:
    """Name, size and kept units of every layer."""
    kept = list(units.sizes)
    if answer is not None:  # a unit is kept if any of its weights is
        entries = units.gather([answer[name].to(w.dtype) for name, w in zip(units.masked, units.weights, strict=True)])
        kept = [0 if values is None else int(values.count_nonzero()) for values in entries]
    return [{"name": n, "size": s, "kept": k} for n, s, k in zip(units.names, units.sizes, kept, strict=True)]
