"""A runtime in a process of its own: what it takes to begin, and how much memory it needs.

`python -m harp.bench.fresh RUNTIME FILE IMAGES THREADS` opens a file, predicts once, and prints the seconds and bytes
as JSON. Only the standard library is imported before the clock runs.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harp.errors import CheckpointError

PATIENCE = 600.0
"""Seconds that a process of its own may take to open a file and answer."""


def measure(runtime: str, file: Path, images: Path, threads: int) -> dict[str, Any]:
    """Start a process that opens `file` and predicts `images` (of `numpy.save`) once.

    Gives `import_seconds`, `open_seconds`, `first_seconds` (of the first prediction), `peak_bytes` of the whole process
    and `added_bytes`, those beyond what it had after the imports; None where the system doesn't tell.
    """
    # At this point a parent's settings are none of the child's: one that counts threads must get its own.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "harp.bench.fresh", runtime, str(file), str(images), str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{runtime} has not predicted with {file} in {PATIENCE:g} seconds") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CheckpointError(f"{runtime} can't use {file} in a process of its own: {lines[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(runtime: str, file: str, images: str, threads: str) -> None:
    """What the new process does."""
    began = time.perf_counter()
    from harp.bench.runtimes import RUNTIMES

    chosen = RUNTIMES[runtime]
    chosen.load()
    import numpy

    imported = time.perf_counter()
    before = resident()
    x = numpy.load(images, allow_pickle=False)
    start = time.perf_counter()
    predict = chosen.opened(Path(file), int(threads))
    opened = time.perf_counter()
    predict(x)
    first = time.perf_counter()
    peak = most_resident()
    found = {
        "import_seconds": imported - began,
        "open_seconds": opened - start,
        "first_seconds": first - opened,
        "peak_bytes": peak,
        "added_bytes": None if peak is None or before is None else max(0, peak - before),
    }
    print(json.dumps(found))


def most_resident() -> int | None:
    """The most memory that this process has had, in bytes.

    Linux also tells it by `getrusage`, but there a child begins with what its parent had.
    """
    told = _status("VmHWM")
    if told is None and sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return told


def resident() -> int | None:
    """The memory that this process has now, in bytes; elsewhere than on Linux the most that it has had."""
    told = _status("VmRSS")
    return most_resident() if told is None else told


def _status(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
