"""The rank of this process and the size of the run, from environment variables.

torchrun and our own launcher set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; srun sets
SLURM_* for every task of a step. The variables that SLURM sets for a whole job don't imply srun: a plain command in a
batch script has them too, and would wait for processes that were never started.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from harp.errors import RecipeError

PORT = 29500  # the default port of process 0
_STANDARD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


@dataclass(frozen=True)
class Machines:
    """The devices and machines to run on: the arguments of `harp.system.distributed.fabric.launch`."""

    devices: int = 1
    accelerator: str = "auto"
    nodes: int = 1
    node_rank: int = 0
    main_address: str | None = None


@dataclass(frozen=True)
class Place:
    """The rank of a process in the run and on its machine, and the address of process 0."""

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1  # processes on this machine
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = PORT

    def environment(self) -> dict[str, str]:
        """The environment variables that give a process this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def read_address(text: str) -> tuple[str, int | None]:
    """Host and port from HOST, HOST:PORT or, for IPv6, [HOST]:PORT."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?", text)
    port = int(match[3]) if match is not None and match[3] else None
    if match is None or (port is not None and not 0 < port < 65536):
        raise RecipeError(f"main address {text!r}: write HOST or HOST:PORT, like gpu01:29500 or [fe80::1]:29500")
    return match[1] or match[2], port


def here(variables: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process if it was started as one of several, otherwise None."""
    try:
        if all(name in variables for name in _STANDARD):
            return _standard(variables)
        if all(name in variables for name in _SLURM):
            return _slurm(variables)
    except ValueError as error:
        raise RecipeError(f"the environment variables of a distributed run are wrong: {error}") from error
    return None


def _standard(variables: Mapping[str, str]) -> Place:
    world = int(variables["WORLD_SIZE"])
    local_world = int(variables.get("LOCAL_WORLD_SIZE", world))
    return Place(
        int(variables["RANK"]),
        world,
        int(variables["LOCAL_RANK"]),
        local_world,
        int(variables.get("GROUP_RANK", variables.get("NODE_RANK", 0))),
        max(1, int(variables.get("GROUP_WORLD_SIZE", world // local_world))),
        variables["MASTER_ADDR"],
        int(variables["MASTER_PORT"]),
    )


def _slurm(variables: Mapping[str, str]) -> Place | None:
    world = int(variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", 1)))
    if world == 1:
        return None  # a single task may start other processes with our launcher
    node = int(variables["SLURM_NODEID"])
    tasks = _tasks(variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", str(world))))
    hosts = variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_NODELIST", "127.0.0.1"))
    job = int(variables.get("SLURM_JOB_ID", 0))
    return Place(
        int(variables["SLURM_PROCID"]),
        world,
        int(variables["SLURM_LOCALID"]),
        tasks[min(node, len(tasks) - 1)],
        node,
        len(tasks),
        variables.get("MASTER_ADDR", first_host(hosts)),
        int(variables.get("MASTER_PORT", 15000 + job % 10000)),  # jobs that share a machine need different ports
    )


def _tasks(text: str) -> list[int]:
    """The number of tasks of each machine, from SLURM's `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per machine, like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(hosts: str) -> str:
    """The first machine of a SLURM list like `gpu[03-05,9],login`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]\-,]+)[^\]]*\])?([^,]*)", hosts)
    return hosts if match is None else f"{match[1]}{match[2] or ''}{match[3]}"
