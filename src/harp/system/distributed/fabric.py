"""Lightning Fabric, which handles devices, precision and several processes."""

import atexit
import inspect
import logging
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from harp.errors import RecipeError
from harp.system.distributed import environment
from harp.system.distributed.environment import Machines, Place
from harp.system.distributed.launcher import supervise

if TYPE_CHECKING:
    from lightning_fabric import Fabric

# The time limit of a collective operation. Heartbeats detect a dead process much sooner.
TIMEOUT = timedelta(minutes=30)


def launch(
    precision: str = "auto",
    accelerator: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    *,
    node_rank: int = 0,
    main_address: str | None = None,
) -> "Fabric":
    """Start Fabric: in one process, in several by our launcher, or in those that torchrun or SLURM have started.

    With several devices or nodes the first call does not return: it starts one process for each device with the same
    command line, waits for them and exits. In those processes the call returns. The returned Fabric reduces gradients
    but does not synchronise the buffers of modules: `harp.fit` does that after every step.

    Arguments:
        precision: "auto" or a precision of Fabric, see `resolve`.
        nodes: the number of machines; run the same command on each, with its `node_rank` and the first one's address.
        main_address: HOST or HOST:PORT of the first machine.
        accelerator: "auto", "cpu", "cuda" or "mps".
        devices: the number of processes on this machine.
        node_rank: the number of this machine, from 0.

    Example:
        fabric = harp.launch(devices=1)
        harp.fit(model, batches, harp.Natural(), harp.Dense(units), epochs=1, fabric=fabric)
    """
    if devices < 1 or nodes < 1:
        raise RecipeError(f"devices {devices}, nodes {nodes}: give at least 1")
    place = environment.here()
    if place is None and devices * nodes > 1:
        if not 0 <= node_rank < nodes:  # only checked for our launcher: torchrun and SLURM number the machines
            rank = f"node rank {node_rank} (--node-rank, or the variable NODE_RANK)"
            raise RecipeError(f"{rank} of {nodes} nodes: give 0 to {nodes - 1}")
        if nodes > 1 and main_address is None:
            raise RecipeError(f"{nodes} nodes need the address of the first one: add --main-address HOST:PORT")
        if not _on_cpu(accelerator):
            _fabric(precision, accelerator, Place(local_world=devices))  # report wrong settings once, before launching
        sys.exit(supervise(devices, nodes, node_rank, main_address, on_cpu=_on_cpu(accelerator)))
    fabric = _fabric(precision, accelerator, place or Place())
    fabric.launch()
    atexit.register(_end_process_group)
    return fabric


def _end_process_group() -> None:
    """End the threads of the process group before Python shuts down.

    Python aborts the process if such a thread frees a tensor afterwards. After an error they may wait for a process
    that is gone, so they are left alone then.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized() and not hasattr(sys, "last_value"):
        torch.distributed.destroy_process_group()


def device_for_evaluation(machines: Machines) -> torch.device:
    """The device of an evaluation; a single process on the CPU does not import Fabric, which is slow."""
    single = machines.devices * machines.nodes == 1 and environment.here() is None
    if single and _on_cpu(machines.accelerator):
        return torch.device("cpu")
    return launch("32-true", **vars(machines)).device


def _fabric(precision: str, accelerator: str, place: Place) -> "Fabric":
    from lightning_fabric import Fabric  # takes two seconds to import, and not every command needs it
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy

    class Started(TorchElasticEnvironment):
        """Processes that are already started; machines may have different numbers of them."""

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            pass

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it logs five lines of setup in every process
    settings: dict[str, Any] = {"accelerator": accelerator, "devices": place.local_world, "num_nodes": place.nodes}
    if place.world > 1:
        parameters = inspect.signature(DistributedDataParallel).parameters  # newer versions of torch rename the option
        name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
        options: dict[str, Any] = {"timeout": TIMEOUT, name: False}  # `fit` synchronises buffers once a step
        os.environ.update(place.environment())  # srun does not set the variables that Fabric reads
        settings["strategy"] = DDPStrategy(cluster_environment=Started(), **options)
    else:
        settings["plugins"] = [LightningEnvironment()]  # given, so that Fabric does not look for a scheduler
    try:
        return Fabric(precision=resolve(precision, accelerator), **settings)  # type: ignore[arg-type]  # a literal, checked by the recipe
    except (ValueError, RuntimeError) as error:
        raise RecipeError(
            f"can't run on {place.local_world} x {accelerator!r}: {' '.join(str(error).split())}"
        ) from error


def resolve(precision: str, accelerator: str = "auto") -> str:
    """The precision that `auto` selects: bfloat16 on a GPU with hardware support for it, otherwise float32."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if accelerator in ("auto", "cuda", "gpu") and _has_bf16() else "32-true"


def possible(precision: str) -> tuple[str, ...]:
    """The precisions that `resolve` may return on other machines."""
    return (precision,) if precision != "auto" else ("32-true", "bf16-mixed")


def _has_bf16() -> bool:
    """Whether the GPU supports bfloat16 in hardware; emulation is slower than float32."""
    if not torch.cuda.is_available():
        return False
    try:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    except TypeError:  # older versions of torch have no such argument
        return torch.cuda.get_device_capability() >= (8, 0)


def _on_cpu(accelerator: str) -> bool:
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
