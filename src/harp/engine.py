"""The engine that a training runs on: Lightning Fabric for devices, precision and several processes."""

import os
from typing import Any

import torch

from harp.errors import RecipeError


def launch(precision: str = "auto", accelerator: str = "auto", devices: int = 1, nodes: int = 1) -> Any:
    """Start the engine: one process by default, more by its own launcher, or those that torchrun or SLURM started.

    See `resolve` for `precision`.
    """
    from lightning_fabric import Fabric  # two seconds of import that only training needs

    if devices < 1 or nodes < 1:
        raise RecipeError(f"devices {devices}, nodes {nodes}: give at least 1")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has decided already
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    try:
        settings: dict[str, Any] = {"accelerator": accelerator, "devices": devices, "num_nodes": nodes}
        fabric = Fabric(precision=resolve(precision), **settings)  # type: ignore[arg-type]  # a literal, checked by the recipe
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"can't run on {devices} x {accelerator!r}: {' '.join(str(error).split())}") from error
    fabric.launch()
    return fabric


def resolve(precision: str) -> str:
    """What `auto` means here: bfloat16 where a GPU computes in it, else float32."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "32-true"
