"""Runs in processes of this machine."""

import os
import subprocess
from pathlib import Path

from harp.experiments.pool import Process
from harp.experiments.slurm.command import harp_run
from harp.system.distributed import affinity


def start(
    recipe: Path,
    out: Path,
    data_dir: Path | None,
    log: Path,
    jobs: int,
    *,
    devices: int = 1,
    workers: int | None = None,
    minutes: float | None = None,
) -> Process:
    """Start `harp run` on its share of the machine's cores, with what it says in a log."""
    share = max(1, len(affinity.usable()) // (jobs * devices))
    wished = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(share, int(wished)) if wished.isdigit() and int(wished) else share
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("HARP_WORKERS", str(share - 1))  # who decodes images ahead has its share of cores, too
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        # A session of its own: a terminal's Ctrl-C goes to us alone and is passed on once. Twice would end it unsaved.
        return subprocess.Popen(
            harp_run(recipe, out, data_dir, devices=devices, workers=workers, minutes=minutes),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
