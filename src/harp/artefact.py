"""The artefact: a finished network on disk, its masks, and what it says of itself."""

from pathlib import Path
from typing import Any

from torch import nn

from harp import checkpoint, masks
from harp.errors import BudgetError
from harp.masks import Masks
from harp.units import Units


def save(folder: Path, model: nn.Module, answer: Masks | None, total: int | None) -> None:
    """Write the network and its masks, after checking once more that the budget (if there is one) is met exactly."""
    if answer is not None:
        kept, strays = masks.kept(answer), outside(model, answer)
        total = kept if total is None else total
        if kept != total or strays:
            raise BudgetError(f"{kept:,} weights kept and {strays:,} outside the masks, but the budget is {total:,}")
        masks.save(folder / "masks.safetensors", answer)
    checkpoint.save_model(folder / "model.safetensors", model)


def outside(model: nn.Module, answer: Masks) -> int:
    """How many weights live outside the masks: none, ever."""
    parameters = dict(model.named_parameters())
    return sum(int(parameters[n][~mask.to(parameters[n].device)].count_nonzero()) for n, mask in answer.items())


def layers(units: Units, answer: Masks | None) -> list[dict[str, Any]]:
    """Name, size and kept weights of every layer."""
    kept = units.sizes if answer is None else [int(answer[name].count_nonzero()) for name in units.names]
    return [{"name": n, "size": s, "kept": k} for n, s, k in zip(units.names, units.sizes, kept, strict=True)]
