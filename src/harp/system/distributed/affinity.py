"""The cores that a process may use, and how many processes of a run share them."""

import os
import socket
from collections.abc import Callable

_Cores = tuple[str, frozenset[int]]  # the host of a process, and the cores that it may use


def usable() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def sharers(gather: Callable[[_Cores], list[_Cores]]) -> int:
    """How many processes of the run, with this one, share its cores; 1 if every process is bound to its own cores.

    A collective operation: all processes have to call it. `gather` returns the values of all of them.
    """
    host, own = socket.gethostname(), usable()
    on_this_host = [cores for other, cores in gather((host, own)) if other == host]
    return max(sum(core in cores for cores in on_this_host) for core in own)
