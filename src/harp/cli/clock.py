"""The start time of the command, from which a time limit counts."""

import os
import time
from pathlib import Path

from harp.system.distributed.launcher import SUPERVISOR


def began() -> float:
    """The start of this process, or of the supervisor that launched it, on the clock of `time.monotonic`.

    The current time if the system does not report it.
    """
    try:
        fields = Path(f"/proc/{os.environ.get(SUPERVISOR, 'self')}/stat").read_text().rpartition(") ")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    return time.monotonic() - max(0.0, age)
