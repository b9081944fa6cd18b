"""Where a process stands among those that train together, as told by whoever started it.

torchrun and our own supervisor set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
srun sets SLURM_* for every task of a step. The variables that SLURM sets for a whole job are no sign of srun: a plain
command in a batch script has them too, and would wait for others that never come.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from harp.errors import RecipeError

PORT = 29500  # where the first process listens, unless somebody says otherwise
_STANDARD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


@dataclass(frozen=True)
class Machines:
    """What somebody wants to run on: the arguments of `harp.processes.engine.launch`."""

    devices: int = 1
    accelerator: str = "auto"
    nodes: int = 1
    node_rank: int = 0
    main_address: str | None = None


@dataclass(frozen=True)
class Place:
    """A process's number among all and on its machine, and where the first one is reached."""

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1  # processes on this machine
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = PORT

    def environment(self) -> dict[str, str]:
        """The variables by which a process learns its place."""
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
    """Host and port of HOST, HOST:PORT or, of IPv6, [HOST]:PORT."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?", text)
    port = int(match[3]) if match is not None and match[3] else None
    if match is None or (port is not None and not 0 < port < 65536):
        raise RecipeError(f"main address {text!r}: write HOST or HOST:PORT, like gpu01:29500 or [fe80::1]:29500")
    return match[1] or match[2], port


def here(variables: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place, if somebody has started it as one of several."""
    try:
        if all(name in variables for name in _STANDARD):
            return _standard(variables)
        if all(name in variables for name in _SLURM):
            return _slurm(variables)
    except ValueError as error:
        raise RecipeError(f"the environment tells no place among the processes: {error}") from error
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
        return None  # a single task is free to start others by itself
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
        int(variables.get("MASTER_PORT", 15000 + job % 10000)),  # jobs that share a machine need ports of their own
    )


def _tasks(text: str) -> list[int]:
    """How many tasks each machine has, from SLURM's `2(x3),1`."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of tasks a machine, like 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def first_host(hosts: str) -> str:
    """The first machine of SLURM's `gpu[03-05,9],login`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]\-,]+)[^\]]*\])?([^,]*)", hosts)
    return hosts if match is None else f"{match[1]}{match[2] or ''}{match[3]}"
