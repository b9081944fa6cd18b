"""When the command began: what a time limit counts from."""

import os
import time
from pathlib import Path

from harp.processes.supervisor import SUPERVISOR


def began() -> float:
    """When the command was started, by `time.monotonic`: by this process, or by the one that started it with others.

    Where the system does not tell, it is now.
    """
    try:
        fields = Path(f"/proc/{os.environ.get(SUPERVISOR, 'self')}/stat").read_text().rpartition(") ")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    return time.monotonic() - max(0.0, age)
