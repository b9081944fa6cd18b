"""Open a network's file in a fresh process: its logits, the seconds to start, and the memory.

`python -m harp.deploy.fresh_process RUNTIME FILE FOLDER THREADS` predicts the batches in FOLDER/images.npz, writes
FOLDER/logits.npy and prints the measurements as JSON. Only the standard library is imported before the clock runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harp
from harp.errors import CheckpointError
from harp.system.memory import most_resident, resident

TIME_LIMIT = 600.0
"""The time limit in seconds of a fresh process that opens a file and predicts."""


def predict(runtime: str, file: Path, batches: Sequence[Any], threads: int) -> tuple[Any, dict[str, Any]]:
    """The logits of all batches as one array, and the measurements of the process.

    Measurements are `import_seconds`, `open_seconds`, `first_seconds` (of the first batch), `peak_bytes` of the whole
    process, `added_bytes` (the memory beyond that after the imports; None where the system does not report memory), and
    `torch`, whether torch was loaded.
    """
    import numpy

    with tempfile.TemporaryDirectory() as folder:
        numpy.savez(Path(folder, "images.npz"), *batches)
        # The child imports this same package. -P keeps modules of the working folder out.
        package = str(Path(harp.__file__).resolve().parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        arguments = [runtime, str(file.absolute()), folder, str(threads)]
        command = [sys.executable, "-P", "-m", __name__, *arguments]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, env=environment)
        except subprocess.TimeoutExpired as error:
            work = f"{sum(map(len, batches))} images in {TIME_LIMIT:g} seconds"
            raise CheckpointError(f"{runtime}: a fresh process has not predicted {work}") from error
        if process.returncode:
            lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise CheckpointError(f"{runtime}: the file can't be used in a fresh process: {lines[-1][:300]}")
        measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return numpy.load(Path(folder, "logits.npy"), allow_pickle=False), measured


def main(runtime: str, file: str, folder: str, threads: str) -> None:
    """Open the file in this process, predict, write the logits and print the measurements."""
    began = time.perf_counter()
    from harp.deploy.runtimes import RUNTIMES

    opener = RUNTIMES[runtime].load()
    import numpy

    imported = time.perf_counter()
    before = resident()
    with numpy.load(Path(folder, "images.npz"), allow_pickle=False) as stored:
        batches = [stored[name] for name in stored.files]
    start = time.perf_counter()
    function = opener(Path(file), int(threads))
    opened = time.perf_counter()
    logits = [function(batches[0])]
    first = time.perf_counter()
    peak = most_resident()
    logits += [function(batch) for batch in batches[1:]]
    numpy.save(Path(folder, "logits.npy"), numpy.concatenate(logits))
    measured = {
        "import_seconds": imported - began,
        "open_seconds": opened - start,
        "first_seconds": first - opened,
        "peak_bytes": peak,
        "added_bytes": None if peak is None or before is None else max(0, peak - before),
        "torch": "torch" in sys.modules,
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:  # the caller reads one line, whatever a library raises
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
