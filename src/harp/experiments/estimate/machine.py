"""What this machine has left: memory and disk."""

import os
import shutil
from pathlib import Path

from harp.system.files import existing


def free_memory() -> int | None:
    """Bytes that new work can have, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all of it: the best guess
    except (AttributeError, ValueError, OSError):
        return None


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is, or will be."""
    return shutil.disk_usage(existing(folder)).free
