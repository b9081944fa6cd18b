"""Time several variants of the same work side by side, so that other load on the machine affects all alike.

The variants take turns in one process, in an order that rotates, and medians are compared. Two clocks run: the CPU time
of the process, which other programs disturb least, and the wall clock, which alone shows what more threads are worth.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from harp.deploy.bench import cpu_name

__all__ = ["Times", "cpu_name", "interleaved", "load"]


@dataclass
class Times:
    """The seconds of one variant, one entry a repeat."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def median(self, clock: str) -> float:
        """The median by `cpu` or `wall`."""
        return statistics.median(getattr(self, clock))

    def spread(self, clock: str) -> float:
        """How far apart the extremes are, relative to the median."""
        seconds = getattr(self, clock)
        return (max(seconds) - min(seconds)) / self.median(clock)


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    on_measured: Callable[[str, int, float], None] = lambda name, repeat, seconds: None,
) -> dict[str, Times]:
    """Call every variant once a repeat and time it; they have to be warm.

    `on_measured(name, repeat, wall seconds)` is called after each, for a display.
    """
    times = {name: Times() for name in variants}
    names = list(variants)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            cpu, wall = time.process_time(), time.perf_counter()
            variants[name]()
            times[name].cpu.append(time.process_time() - cpu)
            times[name].wall.append(time.perf_counter() - wall)
            on_measured(name, repeat, times[name].wall[-1])
    return times


def load() -> float | None:
    """The load average of the last minute, where the system reports it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
