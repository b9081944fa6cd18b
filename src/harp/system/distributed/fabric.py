"""The engine that a training runs on: Lightning Fabric for devices, precision and several processes."""

import inspect
import logging
import sys
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from harp.errors import RecipeError
from harp.processes import placement
from harp.processes.placement import Machines, Place
from harp.processes.supervisor import supervise

# How long processes wait for each other in an exchange before they give up. One that is dead is noticed much sooner.
TIMEOUT = timedelta(minutes=30)


def launch(
    precision: str = "auto",
    accelerator: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    *,
    node_rank: int = 0,
    main_address: str | None = None,
) -> Any:
    """Start the engine: one process by default, more by our own launcher, or those that torchrun or SLURM started.

    With several devices or nodes this call does not return in the process that makes it first: it starts as many
    processes with the same command line, in which it does return, waits for them and exits. What it returns exchanges
    gradients but not the buffers of modules: `harp.fit` does that after every step.

    Arguments:
        precision: see `resolve`.
        nodes: machines; the same command is to be given on each, with its `node_rank` and the first one's address.
        main_address: HOST or HOST:PORT of the first machine.
    """
    if devices < 1 or nodes < 1:
        raise RecipeError(f"devices {devices}, nodes {nodes}: give at least 1")
    place = placement.here()
    if place is None and devices * nodes > 1:
        if not 0 <= node_rank < nodes:  # whoever else starts the processes numbers the machines in its own way
            told = f"node rank {node_rank} (--node-rank, or the variable NODE_RANK)"
            raise RecipeError(f"{told} of {nodes} nodes: give 0 to {nodes - 1}")
        if nodes > 1 and main_address is None:
            raise RecipeError(f"{nodes} nodes need the address of the first one: add --main-address HOST:PORT")
        if not _on_cpu(accelerator):
            _fabric(precision, accelerator, Place(local_world=devices))  # what is wrong with them is said here, once
        sys.exit(supervise(devices, nodes, node_rank, main_address, on_cpu=_on_cpu(accelerator)))
    fabric = _fabric(precision, accelerator, place or Place())
    fabric.launch()
    return fabric


def device_for_evaluation(machines: Machines) -> torch.device:
    """Start what an evaluation runs on: by itself on the CPU no engine is needed, which saves its import."""
    alone = machines.devices * machines.nodes == 1 and placement.here() is None
    if alone and _on_cpu(machines.accelerator):
        return torch.device("cpu")
    device: torch.device = launch("32-true", **vars(machines)).device
    return device


def _fabric(precision: str, accelerator: str, place: Place) -> Any:
    from lightning_fabric import Fabric  # two seconds of import that only training needs
    from lightning_fabric.strategies.ddp import DDPStrategy

    from harp.processes.cluster import Cluster

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # five lines a process on how it found the others
    settings: dict[str, Any] = {"accelerator": accelerator, "devices": place.local_world, "num_nodes": place.nodes}
    if place.world > 1:
        known = inspect.signature(DistributedDataParallel).parameters  # the name has changed
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        how: dict[str, Any] = {"timeout": TIMEOUT, name: False}  # `fit` shares them once a step
        settings["strategy"] = DDPStrategy(cluster_environment=Cluster(place), **how)
    else:
        settings["plugins"] = [Cluster(place)]
    try:
        return Fabric(precision=resolve(precision, accelerator), **settings)  # type: ignore[arg-type]  # a literal, checked by the recipe
    except (ValueError, RuntimeError) as error:
        raise RecipeError(
            f"can't run on {place.local_world} x {accelerator!r}: {' '.join(str(error).split())}"
        ) from error


def resolve(precision: str, accelerator: str = "auto") -> str:
    """What `auto` means here: bfloat16 where a GPU is used that computes in it, else float32."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if accelerator in ("auto", "cuda", "gpu") and _has_bf16() else "32-true"


def possible(precision: str) -> tuple[str, ...]:
    """What a precision may mean on a machine that is not this one."""
    return (precision,) if precision != "auto" else ("32-true", "bf16-mixed")


def _has_bf16() -> bool:
    """Whether the GPU computes in bfloat16 itself; what is emulated is slower than float32."""
    if not torch.cuda.is_available():
        return False
    try:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    except TypeError:  # a torch that does not know the difference
        return torch.cuda.get_device_capability() >= (8, 0)


def _on_cpu(accelerator: str) -> bool:
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
