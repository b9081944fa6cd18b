"""The cores of a machine, and how many of a run's processes have to share them."""

import os
import socket
from typing import Protocol, TypeVar

T = TypeVar("T")


class Peers(Protocol):
    """The processes of a run, see `harp.processes.peers`."""

    def gather(self, value: T) -> list[T]:
        """The values of all, in their order."""
        ...


def usable() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def sharers(peers: Peers) -> int:
    """How many of the processes, this one among them, run on its cores: one where each is bound to its own.

    All of them have to ask.
    """
    machine, mine = socket.gethostname(), usable()
    beside = [cores for where, cores in peers.gather((machine, mine)) if where == machine]
    return max(sum(core in cores for cores in beside) for core in mine)
