"""Measure a runtime in a fresh process: cold start and memory.

`python -m harp.deploy.bench.fresh RUNTIME FILE IMAGES THREADS` opens a file, predicts once, and prints the
seconds and bytes as JSON. Only the standard library is imported before the clock runs.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harp.errors import CheckpointError
from harp.system.memory import most_resident, resident

PATIENCE = 600.0
"""The time limit in seconds of a fresh process that opens a file and predicts."""


def measure(runtime: str, file: Path, images: Path, threads: int) -> dict[str, Any]:
    """Start a process that opens `file` and predicts `images` (of `numpy.save`) once.

    Returns `import_seconds`, `open_seconds`, `first_seconds` (of the first prediction), `peak_bytes` of the whole
    process and `added_bytes`, the memory beyond that after the imports; None where the system does not report memory.
    """
    # Set for the child only: the parent's number of threads must not reach it.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "harp.deploy.bench.fresh", runtime, str(file), str(images), str(threads)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{runtime} has not predicted with {file} in {PATIENCE:g} seconds") from error
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise CheckpointError(f"{runtime} can't use {file} in a process of its own: {lines[-1]}")
    measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return measured


def main(runtime: str, file: str, images: str, threads: str) -> None:
    """Open the file in this process, predict once and print the measurements."""
    began = time.perf_counter()
    from harp.deploy.bench.runtimes import RUNTIMES

    selected = RUNTIMES[runtime]
    selected.load()
    import numpy

    imported = time.perf_counter()
    before = resident()
    x = numpy.load(images, allow_pickle=False)
    start = time.perf_counter()
    predict = selected.opened(Path(file), int(threads))
    opened = time.perf_counter()
    predict(x)
    first = time.perf_counter()
    peak = most_resident()
    measured = {
        "import_seconds": imported - began,
        "open_seconds": opened - start,
        "first_seconds": first - opened,
        "peak_bytes": peak,
        "added_bytes": None if peak is None or before is None else max(0, peak - before),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
