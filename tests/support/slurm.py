"""A cluster of one machine: stand-ins for SLURM's commands that keep jobs in a folder, and run them when told to."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from harp.system import files

_COMMAND = """import json, sys
from pathlib import Path

name, words, root = sys.argv[1], sys.argv[2:], Path(__file__).parent
options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
with (root / "calls.txt").open("a") as file:
    file.write(json.dumps([name, *words]) + "\\n")
if (root / f"{name}.says").exists():
    sys.exit(eval((root / f"{name}.says").read_text()))
def write(path, job):
    (root / "half").write_text(json.dumps(job))
    (root / "half").replace(path)  # others may be reading it


if name == "sbatch":
    number = 1 + len(list(root.glob("*.job")))
    after = options.get("dependency", "").removeprefix("afterok:") or None
    job = {"script": words[-1], "after": after, "state": "PENDING", "code": None}
    write(root / f"{number}.job", job)
    print(number)
elif name == "squeue":
    numbers = options["jobs"].split(",")
    live = {n: json.loads((root / f"{n}.job").read_text()) for n in numbers if (root / f"{n}.job").exists()}
    live = {n: job for n, job in live.items() if job["state"] in ("PENDING", "RUNNING")}
    if len(numbers) == 1 and not live:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    for n, job in live.items():
        print(f"{n}|{job['state']}|" + ("Dependency" if job["after"] else "Priority"))
elif name == "sacct":
    for n in options["jobs"].split(","):
        job = json.loads((root / f"{n}.job").read_text())
        print(f"{n}|{job['state']}|{job['code'] or 0}:0")
elif name == "scancel":
    path = root / f"{words[-1]}.job"
    write(path, {**json.loads(path.read_text()), "state": "CANCELLED"})
elif name == "scontrol":
    (root / f"{words[-1]}.again").touch()
"""


class Cluster:
    """The folder of the jobs, with the commands in `bin`."""

    def __init__(self, root: Path, commands: tuple[str, ...] = ("sbatch", "squeue", "sacct", "scancel", "scontrol")):
        self.root, self.bin = root, root / "bin"
        self.bin.mkdir(parents=True)
        program = root / "command.py"
        program.write_text(_COMMAND)
        for name in commands:
            path = self.bin / name
            words = shlex.join([sys.executable, "-I", str(program), name])
            path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')  # a #! line can't hold a path with a space
            path.chmod(0o755)

    def says(self, name: str, answer: str) -> None:
        """From now on let a command evaluate something else, and exit with its value."""
        (self.root / f"{name}.says").write_text(answer)

    def calls(self, name: str) -> list[list[str]]:
        """With what words a command was called."""
        path = self.root / "calls.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words for each in lines if (words := json.loads(each))[0] == name]

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.root.glob("*.job"))}

    def run(self, most: int = 99, **environment: str) -> list[str]:
        """Run jobs that wait for nothing, one after the other, until none is left; those that never can are cancelled.

        Returns the names of the scripts in the order of their runs.
        """
        done = []
        while len(done) < most:
            jobs = self.jobs()
            for number, job in jobs.items():
                first = jobs.get(job["after"])
                if job["state"] == "PENDING" and first and first["state"] not in ("PENDING", "RUNNING", "COMPLETED"):
                    self.mark(number, state="CANCELLED")
            ready = [
                number
                for number, job in self.jobs().items()
                if job["state"] == "PENDING" and (not job["after"] or jobs[job["after"]]["state"] == "COMPLETED")
            ]
            if not ready:
                break
            number = ready[0]
            script = Path(jobs[number]["script"])
            self.mark(number, state="RUNNING")
            output = next(line for line in script.read_text().splitlines() if line.startswith("#SBATCH --output="))
            with Path(output.partition("=")[2].strip('"').replace("%%", "%")).open("ab") as log:
                path = f"{self.bin}:{os.environ['PATH']}"
                environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": number, **environment}
                code = subprocess.run(["bash", str(script)], stdout=log, stderr=log, env=environment).returncode
            done.append(script.stem)
            again = self.root / f"{number}.again"
            if again.exists():
                again.unlink()
                self.mark(number, state="PENDING", code=None)
            else:
                self.mark(number, state="FAILED" if code else "COMPLETED", code=code)
        return done

    def mark(self, number: str, **facts: Any) -> None:
        """Change what is known of a job."""
        path = self.root / f"{number}.job"
        files.write_text(path, json.dumps({**json.loads(path.read_text()), **facts}))  # others may be reading it
