"""Runs as jobs of a scheduler: what a job is, how it stands, and the file that remembers which jobs were submitted."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from harp.errors import CheckpointError
from harp.system import files


@dataclass(frozen=True)
class Job:
    """A run that can be done by a job of its own."""

    name: str
    command: tuple[str, ...]
    log: Path
    finished: Callable[[], bool]  # whether the run's outcome is there, whoever did it
    after: str | None = None  # the job that trains what this one begins with


class State(StrEnum):
    """How far a job is."""

    MISSING = "not submitted"
    QUEUED = "queued"
    RUNNING = "running"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True)
class Standing:
    """How a job stands, and what the scheduler or its files say of it."""

    name: str
    state: State
    id: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Submitted:
    """A job that the scheduler has taken: its number there, and the number of the job that it waits for."""

    id: str
    after: str | None


class Ledger:
    """The numbers of submitted jobs, in `jobs.json` of the comparison's folder: written after every submission."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "jobs.json"
        self.jobs: dict[str, Submitted] = {}
        if not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_text("utf-8"))["jobs"]
            self.jobs = {name: Submitted(**record) for name, record in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"can't read {self.path}, which says what jobs were submitted: {files.reason(error)}"
            ) from error

    def add(self, name: str, job: Submitted) -> None:
        """Remember a job, in place of an earlier one of the same run."""
        self.jobs[name] = job
        files.write_json(self.path, {"jobs": {name: asdict(each) for name, each in self.jobs.items()}})
