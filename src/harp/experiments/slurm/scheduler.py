"""SLURM by its commands: `sbatch` takes a job, `squeue` and `sacct` say how it is, `scancel` takes it back."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harp.errors import SchedulerError

_PATIENCE = 60.0  # seconds that a command may take
_ABSENT = "there is no {} here: --launcher slurm is for machines with SLURM (--dry-run only writes files)"
_RUNS = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT")
}


class Waiting(NamedTuple):
    """A job that the scheduler still has."""

    runs: bool
    note: str


def require() -> None:
    """Refuse to go on where no job can be submitted."""
    if shutil.which("sbatch") is None:
        raise SchedulerError(_ABSENT.format("sbatch"))


def submit(script: Path, after: str | None) -> str:
    """Hand a job file in and return the job's number; it starts after job `after` has ended well, or never."""
    words = ["sbatch", "--parsable"]
    if after is not None:
        words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    said = _call([*words, str(script)])
    last = (said.strip().splitlines() or [""])[-1].strip()
    match = re.fullmatch(r"(\d+)(;[\w.-]+)?", last)  # the number, and the cluster's name where there are several
    if match is None:
        raise SchedulerError(f"sbatch said {last[:100]!r} of {script}, expected the number of a job")
    return match[1]


def cancel(number: str) -> None:
    """Take a job back."""
    _call(["scancel", number])


def waiting(numbers: Sequence[str]) -> dict[str, Waiting] | None:
    """Those of the jobs that wait or run; None where there is no `squeue` to ask."""
    if not numbers:
        return {}
    if shutil.which("squeue") is None:
        return None
    words = ["squeue", "--noheader", "--format=%i|%T|%r", f"--jobs={','.join(numbers)}"]
    try:
        said = _call(words)
    except SchedulerError as error:
        if "invalid job id" in str(error).lower():  # of one job that has ended
            return {}
        raise
    found = {}
    for line in said.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if number in numbers and state not in _ENDED:
            found[number] = Waiting(state in _RUNS, state.lower() if reason in ("", "None") else reason)
    return found


def ends(numbers: Sequence[str]) -> dict[str, str]:
    """How jobs that are no longer there ended, as far as the accounting knows: often there is none."""
    if not numbers or shutil.which("sacct") is None:
        return {}
    words = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,ExitCode"]
    try:
        said = _call([*words, f"--jobs={','.join(numbers)}"])
    except SchedulerError:
        return {}
    rows = [line.strip().split("|") for line in said.splitlines()]
    return {row[0]: f"{row[1]}, exit code {row[2].partition(':')[0]}" for row in rows if len(row) == 3}


def _call(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except FileNotFoundError as error:
        raise SchedulerError(_ABSENT.format(words[0])) from error
    except OSError as error:
        raise SchedulerError(f"{words[0]} can't be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{words[0]} did not answer within {_PATIENCE:g} s: try again later") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise SchedulerError(f"{words[0]} failed: {lines[-1][:300] if lines else f'exit code {done.returncode}'}")
    return done.stdout
