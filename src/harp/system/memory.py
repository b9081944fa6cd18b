"""The memory of this process and of the machine, without an additional library."""

import os
import sys
from pathlib import Path


def most_resident() -> int | None:
    """The peak memory use of this process, in bytes.

    `getrusage` is not used on Linux, because a child process starts with the peak of its parent there.
    """
    peak = _status("VmHWM")
    if peak is None and sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak


def resident() -> int | None:
    """The current memory use of this process, in bytes; on systems other than Linux the peak."""
    current = _status("VmRSS")
    return most_resident() if current is None else current


def machine_memory() -> int | None:
    """The machine's memory in bytes, where the system reports it."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _status(key: str) -> int | None:
    """A size from Linux's /proc/self/status, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
