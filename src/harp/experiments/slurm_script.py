"""The job file of a run: an ordinary batch script of SLURM that can also be read, changed and submitted by hand.

The script writes its progress to a small file, because clusters without accounting forget jobs that have ended. SLURM
sends USR1 two minutes before the time limit; the run then saves its state and ends with 75, and the job is queued
again. A run that finishes with a network at chance level ends with 3; its job ends with 0, so that jobs that wait for
it start.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from harp.errors import AT_CHANCE, UNFINISHED, RecipeError

# Options that `harp compare` needs for itself: the log, the dependency, the answer of `sbatch`.
_RESERVED = {
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
wait "$run" # once more for the exit code of the run: a wait that a signal ended gives that of the signal
code=$?
if [ "$code" -eq {at_chance} ]; then # finished, with a network at chance level
    code=0
fi
if [ "$code" -eq {unfinished} ]; then # saved, unfinished: the same command resumes it
    tell again
    scontrol requeue "$SLURM_JOB_ID" && exit {unfinished}
fi
tell "ended:$code"
exit "$code"
"""

# Since SLURM 22.05 srun does not use the job's --cpus-per-task by itself.
_CORES = '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'


def split_options(options: str) -> list[str]:
    """The user's options for `sbatch` as words, checked as far as possible without it."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise RecipeError(f"--sbatch {options!r}: {error}") from error
    if any(ord(character) < 32 for character in options):
        raise RecipeError(f"--sbatch {options!r}: write all options in one line")
    if words and not words[0].startswith("-"):
        raise RecipeError(f'--sbatch {options!r}: write it like "--partition=gpu --gres=gpu:1 --time=8:00:00"')
    for word in words:
        for long, short in _RESERVED.items():
            if word.partition("=")[0] == long or (short and re.match(rf"{short}(?!-)", word)):
                raise RecipeError(f"--sbatch {word}: harp compare sets {long} itself")
    return words


def script(name: str, command: Sequence[str], log: Path, state: Path, options: str = "", devices: int = 1) -> str:
    """The text of a job file; the job writes its progress to the file `state`."""
    directives = [
        f"--job-name={_quoted(f'harp-{name}')}",
        f"--output={_quoted(str(log).replace('%', '%%'))}",
        "--open-mode=append",
        f"--chdir={_quoted(str(Path.cwd()))}",
        "--requeue",
        "--signal=B:USR1@120",
        *([f"--ntasks-per-node={devices}"] if devices > 1 else []),
    ]
    if words := split_options(options):
        directives.append(" ".join(map(_quoted, words)))  # last, as later ones win
    text = shlex.join(command)
    if devices > 1:
        text = f"{_CORES}\nsrun --kill-on-bad-exit=1 {text}"
    body = _BODY.format(state=shlex.quote(str(state)), command=text, at_chance=AT_CHANCE, unfinished=UNFINISHED)
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives), "", body])


def _quoted(value: str) -> str:
    """A value as SLURM reads it in a script."""
    if any(ord(character) < 32 for character in value):
        raise RecipeError(f"{value!r} can't be written into a job file: it contains a line break")
    if re.fullmatch(r"[\w./=:,@%+~-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
