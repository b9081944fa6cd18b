"""Runs as jobs of SLURM: one job file a run, submitted in the order of their dependencies, each only once.

    FOLDER/jobs/NAME.sh      the job file            FOLDER/jobs/NAME.state   how far it is, by itself
    FOLDER/logs/NAME.log     what the run says       FOLDER/jobs.json         the numbers of submitted jobs

A run counts as finished by its own files, whatever the scheduler says; as waiting or running by the scheduler, or by
the job's file where it can't be asked; else it has failed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harp.errors import Interrupted
from harp.experiments.slurm import scheduler, script
from harp.experiments.slurm.jobs import Job, Ledger, Standing, State, Submitted
from harp.system import files
from harp.system.interrupt import Stop
from harp.system.progress import Quiet


class Slurm:
    """The jobs of a comparison.

    Arguments:
        folder: the comparison's.
        options: the user's for `sbatch`, in one line.
        devices: processes of a run, which `srun` starts if there are several.
    """

    def __init__(self, folder: Path, jobs: Sequence[Job], options: str = "", devices: int = 1) -> None:
        self.folder, self.jobs, self.options, self.devices = folder.absolute(), list(jobs), options, devices
        script.words_of(options)

    def write(self) -> list[Path]:
        """Write the job files of the runs that are not finished; return their paths."""
        paths = []
        for job in self.jobs:
            if not job.finished():
                path = self._file(job.name, "sh")
                files.write_text(path, script.text(job, self._file(job.name, "state"), self.options, self.devices))
                job.log.parent.mkdir(parents=True, exist_ok=True)  # or the job would fail without a word
                paths.append(path)
        return paths

    def bring(self) -> list[Standing]:
        """Submit the runs that are neither finished nor waiting nor running; return how all stand then."""
        with files.lock(self.folder / "jobs.lock"):
            self.write()
            ledger = Ledger(self.folder)
            standings = {each.name: each for each in self.look(ledger)}
            for job in self.jobs:
                standings[job.name] = self._bring(job, standings, ledger)
        return list(standings.values())

    def _bring(self, job: Job, standings: Mapping[str, Standing], ledger: Ledger) -> Standing:
        stands = standings[job.name]
        before = None if job.after is None else standings[job.after]
        after = None if before is None or before.state is State.FINISHED else before.id
        known = ledger.jobs.get(job.name)
        # One that waits for a job that has failed would wait for ever, though the run has been submitted anew.
        still = stands.state is State.RUNNING or (known is not None and after in (None, known.after))
        if stands.state is State.FINISHED or (stands.state in (State.QUEUED, State.RUNNING) and still):
            return stands
        if stands.state is State.QUEUED and stands.id is not None:
            scheduler.cancel(stands.id)
        number = scheduler.submit(self._file(job.name, "sh"), after)
        ledger.add(job.name, Submitted(number, after))
        return Standing(job.name, State.QUEUED, number, "submitted")

    def look(self, ledger: Ledger | None = None) -> list[Standing]:
        """How all jobs stand."""
        ledger = ledger or Ledger(self.folder)
        open_ = {job.name: known.id for job in self.jobs if (known := ledger.jobs.get(job.name)) and not job.finished()}
        waiting = scheduler.waiting(list(open_.values()))
        gone = [number for number in open_.values() if waiting is not None and number not in waiting]
        ends = scheduler.ends(gone)
        found: dict[str, Standing] = {}
        for job in self.jobs:
            number = open_.get(job.name)
            if job.finished():
                found[job.name] = Standing(job.name, State.FINISHED)
            elif number is None:
                found[job.name] = Standing(job.name, State.MISSING)
            elif waiting is None:
                found[job.name] = self._by_file(job, number, found)
            elif number in waiting:
                state = State.RUNNING if waiting[number].runs else State.QUEUED
                found[job.name] = Standing(job.name, state, number, waiting[number].note)
            else:
                said = replace(self._by_file(job, number, found), state=State.FAILED)
                found[job.name] = replace(said, note=ends.get(number) or said.note or "left the queue without a word")
        return list(found.values())

    def _by_file(self, job: Job, number: str, others: Mapping[str, Standing]) -> Standing:
        """What the job itself has told."""
        try:
            word, _, teller = self._file(job.name, "state").read_text("utf-8").strip().partition(" ")
        except (OSError, ValueError):
            word = teller = ""
        if teller == number and word == "running":
            return Standing(job.name, State.RUNNING, number)
        if teller == number and word.startswith("ended:"):
            return Standing(job.name, State.FAILED, number, f"exit code {word.removeprefix('ended:')}")
        if job.after is not None and others[job.after].state is State.FAILED:
            return Standing(job.name, State.FAILED, number, f"not started: {job.after} failed")
        return Standing(job.name, State.QUEUED, number)

    def wait(self, display: Quiet, seconds: float = 15.0) -> dict[str, str]:
        """Look every few seconds until no job waits or runs; return what went wrong, by name.

        Ctrl-C and SIGTERM end the waiting, and leave the jobs alone.
        """
        stop, told = Stop(), set[str]()
        with stop.on_signals(), display.counting_runs("runs", len(self.jobs)):
            while True:
                stands = self.look()
                running = [each.name for each in stands if each.state is State.RUNNING]
                for each in stands:
                    if each.state not in (State.QUEUED, State.RUNNING) and each.name not in told:
                        told.add(each.name)
                        display.run_finished(each.name, None if each.state is State.FINISHED else each.note, running)
                display.active_runs(running)
                if len(told) == len(stands):
                    return {each.name: each.note or each.state for each in stands if each.state is not State.FINISHED}
                until = time.monotonic() + seconds
                while time.monotonic() < until and stop.signal is None:
                    time.sleep(min(0.2, seconds))
                if stop.signal is not None:
                    raise Interrupted("stopped waiting; the jobs go on without it", stop.signal)

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / "jobs" / f"{name}.{suffix}"
