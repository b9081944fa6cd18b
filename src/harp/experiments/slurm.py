"""Runs as jobs of SLURM: one job file a run, submitted in the order of their dependencies, each only once.

    FOLDER/jobs/NAME.sh      the job file            FOLDER/jobs/NAME.state   its progress, written by the job
    FOLDER/logs/NAME.log     the output of the run   FOLDER/jobs.json         the numbers of submitted jobs

A run is finished if its own files say so, whatever the scheduler says. It waits or runs if the scheduler says so, or
the job's state file where the scheduler can't be asked. Otherwise it has failed.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from harp.errors import CheckpointError, Interrupted, SchedulerError
from harp.experiments import slurm_script
from harp.system import files
from harp.system.interrupt import Stop
from harp.system.progress import Quiet

_TIMEOUT = 60.0  # seconds for a command of SLURM
_ABSENT = "there is no {} here: --launcher slurm is for machines with SLURM (--dry-run only writes files)"
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT")
}


@dataclass(frozen=True)
class Job:
    """A run that can be done by a job of its own."""

    name: str
    command: tuple[str, ...]
    log: Path
    finished: Callable[[], bool]  # whether the results of the run are there
    after: str | None = None  # the job that trains the network that this one begins with


class State(StrEnum):
    """The state of a job."""

    MISSING = "not submitted"
    QUEUED = "queued"
    RUNNING = "running"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True)
class Status:
    """The state of a job, its number at the scheduler, and a note of the scheduler or of the job's files."""

    name: str
    state: State
    id: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Submitted:
    """A submitted job: its number, and the number of the job that it waits for."""

    id: str
    after: str | None


class Slurm:
    """The jobs of a comparison.

    Arguments:
        folder: the comparison's.
        options: the user's options for `sbatch`, in one line.
        devices: processes of a run, which `srun` starts if there are several.
    """

    def __init__(self, folder: Path, jobs: Sequence[Job], options: str = "", devices: int = 1) -> None:
        self.folder, self.jobs, self.options, self.devices = folder.absolute(), list(jobs), options, devices
        slurm_script.split_options(options)

    def write(self) -> list[Path]:
        """Write the job files of the runs that are not finished; return their paths."""
        paths = []
        for job in self.jobs:
            if not job.finished():
                path, state = self._file(job.name, "sh"), self._file(job.name, "state")
                text = slurm_script.script(job.name, job.command, job.log, state, self.options, self.devices)
                files.write_text(path, text)
                job.log.parent.mkdir(parents=True, exist_ok=True)  # without it the job fails without a message
                paths.append(path)
        return paths

    def submit(self) -> list[Status]:
        """Submit the runs that are neither finished nor queued nor running; return the status of all jobs."""
        with files.lock(self.folder / "jobs.lock"):
            self.write()
            statuses = {status.name: status for status in self.status()}
            for job in self.jobs:
                statuses[job.name] = self._submit(job, statuses)
        return list(statuses.values())

    def _submit(self, job: Job, statuses: Mapping[str, Status]) -> Status:
        status, submitted = statuses[job.name], self._submitted()
        before = None if job.after is None else statuses[job.after]
        after = None if before is None or before.state is State.FINISHED else before.id
        known = submitted.get(job.name)
        # A job that waits for a failed one never starts, even if that run has been submitted again.
        starts = status.state is State.RUNNING or (known is not None and after in (None, known.after))
        if status.state is State.FINISHED or (status.state in (State.QUEUED, State.RUNNING) and starts):
            return status
        if status.state is State.QUEUED and status.id is not None:
            _call(["scancel", status.id])
        number = submit(self._file(job.name, "sh"), after)
        submitted[job.name] = Submitted(number, after)
        files.write_json(self._ledger, {"jobs": {name: asdict(entry) for name, entry in submitted.items()}})
        return Status(job.name, State.QUEUED, number, "submitted")

    @property
    def _ledger(self) -> Path:
        return self.folder / "jobs.json"

    def _submitted(self) -> dict[str, Submitted]:
        """The submitted jobs by name, as `jobs.json` has them after every submission."""
        if not self._ledger.exists():
            return {}
        try:
            jobs = json.loads(self._ledger.read_text("utf-8"))["jobs"]
            return {name: Submitted(**entry) for name, entry in jobs.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = files.reason(error)
            raise CheckpointError(f"can't read {self._ledger}, which lists the submitted jobs: {reason}") from error

    def status(self) -> list[Status]:
        """The status of all jobs."""
        submitted, finished = self._submitted(), {job.name for job in self.jobs if job.finished()}
        numbers = {job.name: submitted[job.name].id for job in self.jobs if job.name in submitted.keys() - finished}
        queued = _queued(list(numbers.values()))
        ends = _ends([number for number in numbers.values() if queued is not None and number not in queued])
        statuses: dict[str, Status] = {}
        for job in self.jobs:
            number = numbers.get(job.name)
            if job.name in finished:
                status = Status(job.name, State.FINISHED)
            elif number is None:
                status = Status(job.name, State.MISSING)
            elif queued is None:
                status = self._by_file(job, number, statuses)
            elif number in queued:
                status = Status(job.name, queued[number][0], number, queued[number][1])
            else:
                note = ends.get(number) or self._by_file(job, number, statuses).note or "left the queue without a word"
                status = Status(job.name, State.FAILED, number, note)
            statuses[job.name] = status
        return list(statuses.values())

    def _by_file(self, job: Job, number: str, others: Mapping[str, Status]) -> Status:
        """The status of a job by its state file."""
        try:
            word, _, writer = self._file(job.name, "state").read_text("utf-8").strip().partition(" ")
        except (OSError, ValueError):
            word = writer = ""
        if writer == number and word == "running":
            return Status(job.name, State.RUNNING, number)
        if writer == number and word.startswith("ended:"):
            return Status(job.name, State.FAILED, number, f"exit code {word.removeprefix('ended:')}")
        if job.after is not None and others[job.after].state is State.FAILED:
            return Status(job.name, State.FAILED, number, f"not started: {job.after} failed")
        return Status(job.name, State.QUEUED, number)

    def wait(self, display: Quiet, seconds: float = 15.0) -> dict[str, str]:
        """Ask every few seconds until no job is queued or running; return the failures by name.

        Ctrl-C and SIGTERM end the waiting, not the jobs.
        """
        stop, shown = Stop(), set[str]()
        with stop.on_signals(), display.counting_runs("runs", len(self.jobs)):
            while True:
                statuses = self.status()
                running = [status.name for status in statuses if status.state is State.RUNNING]
                for status in statuses:
                    if status.state not in (State.QUEUED, State.RUNNING) and status.name not in shown:
                        shown.add(status.name)
                        failure = None if status.state is State.FINISHED else status.note
                        display.run_finished(status.name, failure, running)
                display.active_runs(running)
                if len(shown) == len(statuses):
                    return {s.name: s.note or s.state for s in statuses if s.state is not State.FINISHED}
                until = time.monotonic() + seconds
                while time.monotonic() < until and stop.signal is None:
                    time.sleep(min(0.2, seconds))
                if stop.signal is not None:
                    raise Interrupted("stopped waiting; the jobs go on without it", stop.signal)

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / "jobs" / f"{name}.{suffix}"


# The commands of SLURM


def require() -> None:
    """Raise an error where no job can be submitted."""
    if shutil.which("sbatch") is None:
        raise SchedulerError(_ABSENT.format("sbatch"))


def submit(script: Path, after: str | None) -> str:
    """Submit a job file and return the job's number; the job starts only after job `after` has succeeded."""
    words = ["sbatch", "--parsable"]
    if after is not None:
        words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    last = (_call([*words, str(script)]).strip().splitlines() or [""])[-1].strip()
    match = re.fullmatch(r"(\d+)(;[\w.-]+)?", last)  # the number, and the cluster's name where there are several
    if match is None:
        raise SchedulerError(f"sbatch said {last[:100]!r} of {script}, expected the number of a job")
    return match[1]


def _queued(numbers: Sequence[str]) -> dict[str, tuple[State, str]] | None:
    """State and note of the jobs that are queued or running; None where there is no `squeue`."""
    if not numbers:
        return {}
    if shutil.which("squeue") is None:
        return None
    try:
        answer = _call(["squeue", "--noheader", "--format=%i|%T|%r", f"--jobs={','.join(numbers)}"])
    except SchedulerError as error:
        if "invalid job id" in str(error).lower():  # of one job that has ended
            return {}
        raise
    queued = {}
    for line in answer.splitlines():
        number, state, reason = (*line.strip().split("|", 2), "", "")[:3]
        if number in numbers and state not in _ENDED:
            note = state.lower() if reason in ("", "None") else reason
            queued[number] = (State.RUNNING if state in _RUNNING else State.QUEUED, note)
    return queued


def _ends(numbers: Sequence[str]) -> dict[str, str]:
    """The ends of jobs that have left the queue, as far as the accounting knows them: many clusters have none."""
    if not numbers or shutil.which("sacct") is None:
        return {}
    words = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,ExitCode"]
    try:
        answer = _call([*words, f"--jobs={','.join(numbers)}"])
    except SchedulerError:
        return {}
    rows = [line.strip().split("|") for line in answer.splitlines()]
    return {row[0]: f"{row[1]}, exit code {row[2].partition(':')[0]}" for row in rows if len(row) == 3}


def _call(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT)
    except FileNotFoundError as error:
        raise SchedulerError(_ABSENT.format(words[0])) from error
    except OSError as error:
        raise SchedulerError(f"{words[0]} can't be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{words[0]} did not answer within {_TIMEOUT:g} s: try again later") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise SchedulerError(f"{words[0]} failed: {lines[-1][:300] if lines else f'exit code {done.returncode}'}")
    return done.stdout
