"""The job file of a run: an ordinary batch script of SLURM that can also be read, changed and submitted by hand.

The script tells by a small file how far it is: clusters without accounting forget jobs that have ended. SLURM sends
USR1 two minutes before the time is up; the run then saves its state and ends with 75, and the job queues again. A run
that finishes with a network at chance level ends with 3; its job ends with 0, as jobs that wait for it are to start.
"""

import re
import shlex
from pathlib import Path

from harp.errors import AT_CHANCE, UNFINISHED, RecipeError
from harp.experiments.slurm.jobs import Job

# Options that would break what is promised here: where the log is, what a job waits for, what `sbatch` answers.
_OURS = {
    "--array": "-a",
    "--chdir": "-D",
    "--clusters": "-M",
    "--dependency": "-d",
    "--error": "-e",
    "--output": "-o",
    "--parsable": None,
    "--test-only": None,
    "--wait": "-W",
    "--wrap": None,
}

_BODY = """\
tell() {{ printf '%s %s\\n' "$1" "$SLURM_JOB_ID" > {state}.new && mv {state}.new {state}; }}

export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
tell running
{command} &
run=$!
trap 'kill -USR1 "$run" 2> /dev/null' USR1
trap 'kill -TERM "$run" 2> /dev/null' TERM
wait "$run"
while kill -0 "$run" 2> /dev/null; do # a signal ended the waiting, not the run
    wait "$run"
done
wait "$run" # once more: what a signal ended told of the signal, and bash remembers how the run ended
code=$?
if [ "$code" -eq {at_chance} ]; then # finished: the network answers at chance level, as its summary says
    code=0
fi
if [ "$code" -eq {unfinished} ]; then # saved, unfinished: the same command goes on
    tell again
    scontrol requeue "$SLURM_JOB_ID" && exit {unfinished}
fi
tell "ended:$code"
exit "$code"
"""

# Since SLURM 22.05 srun does not take over the job's --cpus-per-task by itself.
_CORES = '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'


def words_of(options: str) -> list[str]:
    """The user's options for `sbatch`, checked as far as that is possible without it."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise RecipeError(f"--sbatch {options!r}: {error}") from error
    if any(ord(character) < 32 for character in options):
        raise RecipeError(f"--sbatch {options!r}: write all options in one line")
    if words and not words[0].startswith("-"):
        raise RecipeError(f'--sbatch {options!r}: write it like "--partition=gpu --gres=gpu:1 --time=8:00:00"')
    for word in words:
        for long, short in _OURS.items():
            if word.partition("=")[0] == long or (short and re.match(rf"{short}(?!-)", word)):
                raise RecipeError(f"--sbatch {word}: harp compare sets {long} itself")
    return words


def text(job: Job, state: Path, options: str, devices: int = 1) -> str:
    """The script of a job, which tells how far it is in the file `state`."""
    lines = [
        _directive("job-name", f"harp-{job.name}"),
        _directive("output", str(job.log).replace("%", "%%")),
        _directive("open-mode", "append"),
        _directive("chdir", str(Path.cwd())),
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@120",
    ]
    if devices > 1:
        lines.append(f"#SBATCH --ntasks-per-node={devices}")
    if words := words_of(options):
        lines.append(f"#SBATCH {' '.join(_quoted(word) for word in words)}")  # last, as later ones win
    command = shlex.join(job.command)
    if devices > 1:
        command = f"{_CORES}\nsrun --kill-on-bad-exit=1 {command}"
    codes = {"at_chance": AT_CHANCE, "unfinished": UNFINISHED}
    body = _BODY.format(state=shlex.quote(str(state)), command=command, **codes)
    return "\n".join(["#!/bin/bash", *lines, "", body])


def _directive(name: str, value: str) -> str:
    return f"#SBATCH --{name}={_quoted(value)}"


def _quoted(value: str) -> str:
    """A value as SLURM reads it in a script."""
    if any(ord(character) < 32 for character in value):
        raise RecipeError(f"{value!r} can't be written into a job file: it has a line break in it")
    if re.fullmatch(r"[\w./=:,@%+~-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
