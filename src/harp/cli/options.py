"""Options that several commands share, and their help texts."""

import os
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harp.system.distributed.launcher import SUPERVISOR


def start_time() -> float:
    """The start of this process, or of the supervisor that launched it, on the clock of `time.monotonic`.

    The current time if the system does not report it.
    """
    try:
        fields = Path(f"/proc/{os.environ.get(SUPERVISOR, 'self')}/stat").read_text().rpartition(") ")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    return time.monotonic() - max(0.0, age)


BEGAN = start_time()
"""The start time of the command, from which `--max-minutes` counts."""

DataDir = Annotated[Path | None, Option("--data-dir", help="Folder that holds the data set's published files.")]
Out = Annotated[Path, Option("--out", help="Folder for runs; finished stages in it are reused.")]
Set = Annotated[
    list[str], Option("--set", help="Change a value of the recipe, like stages.prune.epochs=5; repeatable.")
]
ShapeData = Annotated[
    str | None, Option("--data", help="Data that decides classes and image shape: a name, a folder or a file.npz.")
]
ModelData = Annotated[
    str | None,
    Option("--data", help="Data, if the target is a model: a name (`harp list data`), a folder or a file.npz."),
]
Size = Annotated[
    int | None, Option(min=1, help="Side of images that are resized; default: what the model is made for.")
]
Normalize = Annotated[
    str | None,
    Option(help="Normalisation in front of the model: MEAN/STD, like 0.5/0.25, or of a data set, like cifar10."),
]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Devices = Annotated[int, Option(min=1, help="Processes (and GPUs) on this machine.")]
Nodes = Annotated[int, Option(min=1, help="Machines; give the same command on each of them.")]
NodeRank = Annotated[int, Option(min=0, envvar="NODE_RANK", help="This machine's number among them, from 0.")]
MainAddress = Annotated[
    str | None, Option(help="HOST or HOST:PORT of machine 0, if there are several.", show_default=False)
]
Minutes = Annotated[float, Option(min=0, help="Save the state of a training at least this often.")]
KeepStates = Annotated[int, Option(min=1, help="States of a training to keep, should the newest be damaged.")]
MaxMinutes = Annotated[
    float | None, Option(help="Save and end within this many minutes; exit code 75 if unfinished.", show_default=False)
]
Workers = Annotated[
    int | None,
    Option(
        min=0,
        envvar="HARP_WORKERS",
        help="Processes that decode images for each training process; default: free cores.",
        show_default=False,
    ),
]
Accelerator = Annotated[str, Option(help="cpu, cuda, mps or auto.")]
Weights = Annotated[Path | None, Option(help="Trained weights: safetensors, or a torch checkpoint.")]
Classes = Annotated[int | None, Option(min=1, help="Number of classes, where no data set says it.")]
Shape = Annotated[str | None, Option(help="Image shape like 3x32x32, where no data set says it.")]
Channels = Annotated[bool, Option("--channels", help="Prune whole channels, not single weights; tensors get smaller.")]
Budget = Annotated[
    str | None, Option(help="What --keep counts: weights, macs; of channels flops, macs, parameters, memory.")
]
PROTOCOL = Option(help="Epochs: given (as the flags say), equal (the same for all methods) or paper (as published).")
KEEP = Option(help="Share to keep of the weights, or of the FLOPs of channels: 1%, 0.01 or 1/100.")
Keep = Annotated[str | None, KEEP]
Method = Annotated[str | None, Option(help="Pruning method (`harp list methods`): hydra, hydra+lamp, harp:reach=0.")]
Strategy = Annotated[str | None, Option(help="Where the budget goes: uniform, erk, lamp, igq, boosted, blend, global.")]
OBJECTIVE = Option(help="Training objective: pgd, trades, mart, fast, free or natural.")
Objective = Annotated[str | None, OBJECTIVE]
RECIPE = Argument(help="A base (`harp list recipes`), a short name like fashion/hydra-lamp-99, or a YAML file.")
Multiple = Annotated[int, Option(min=1, help="Keep a multiple of so many channels, as some hardware wants it.")]
Model = Annotated[str, Argument(help="A name (`harp list models`), torchvision:NAME, timm:NAME or file.py:function.")]
Launcher = Annotated[str, Option(help="Where runs are done: local (processes) or slurm (a job each).")]
Sbatch = Annotated[str, Option(help='SLURM: options of each job, like "--partition=gpu --gres=gpu:1 --time=8:00:00".')]


def check_launcher(launcher: str, slurm_options: object, max_minutes: float | None) -> None:
    """Refuse an unknown launcher, and options that belong to the other one."""
    from harp.errors import RecipeError
    from harp.experiments.recipe import unknown

    if launcher not in ("local", "slurm"):
        raise RecipeError(unknown("launcher", launcher, ("local", "slurm")))
    if launcher == "local" and slurm_options:
        raise RecipeError("--sbatch, --dry-run and --wait are for --launcher slurm")
    if launcher == "slurm" and max_minutes is not None:
        raise RecipeError('--max-minutes is for --launcher local; SLURM limits its jobs by --sbatch "--time=8:00:00"')
