"""Options that several commands share, and their help texts."""

from pathlib import Path
from typing import Annotated

import typer

from harp.cli.clock import began

BEGAN = began()
"""The start time of the command, from which `--max-minutes` counts."""

SIGNS = {"good": "✓", "look": "?", "bad": "✗"}
"""The marks of verdicts in tables."""

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder that holds the data set's published files.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for runs; finished stages in it are reused.")]
Set = Annotated[
    list[str], typer.Option("--set", help="Change a value of the recipe, like stages.prune.epochs=5; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Devices = Annotated[int, typer.Option(help="Processes (and GPUs) on this machine.")]
Nodes = Annotated[int, typer.Option(help="Machines; give the same command on each of them.")]
NodeRank = Annotated[int, typer.Option(envvar="NODE_RANK", help="This machine's number among them, from 0.")]
MainAddress = Annotated[
    str | None, typer.Option(help="HOST or HOST:PORT of machine 0, where several are.", show_default=False)
]
Minutes = Annotated[float, typer.Option(help="Save the state of a training at least this often.")]
KeepStates = Annotated[int, typer.Option(help="States of a training to keep, should the newest be damaged.")]
MaxMinutes = Annotated[
    float | None,
    typer.Option(
        help="Save and end before this many minutes are over, with exit code 75 if there is more to do.",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        envvar="HARP_WORKERS",
        help="Processes that decode streamed images ahead of each training process; default: the cores that are left.",
        show_default=False,
    ),
]
Accelerator = Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")]
Weights = Annotated[Path | None, typer.Option(help="Trained weights: safetensors, or a torch checkpoint.")]
Classes = Annotated[int | None, typer.Option(help="Number of classes, where no data set says it.")]
Shape = Annotated[str | None, typer.Option(help="Image shape like 3x32x32, where no data set says it.")]
Channels = Annotated[
    bool, typer.Option("--channels", help="Prune whole channels instead of single weights; tensors get smaller.")
]
Budget = Annotated[
    str | None,
    typer.Option(help="What --keep counts: weights or macs; flops, macs, parameters or memory of channels."),
]
KEEP = typer.Option(help="Share to keep of the weights, or of the FLOPs of channels: 1%, 0.01 or 1/100.")
Keep = Annotated[str | None, KEEP]
Method = Annotated[
    str | None, typer.Option(help="Pruning method (`harp list methods`), like hydra, hydra+lamp or harp:reach=0.")
]
Strategy = Annotated[
    str | None, typer.Option(help="Where the budget goes: uniform, erk, lamp, igq, boosted, blend or global.")
]
OBJECTIVE = typer.Option(help="Training objective: pgd, trades, mart, fast, free or natural.")
Objective = Annotated[str | None, OBJECTIVE]
RECIPE = typer.Argument(
    help="A base (`harp list recipes`), a short name like fashion/hydra-lamp-99, or a YAML file of your own."
)
Multiple = Annotated[int, typer.Option(help="Keep a multiple of so many channels, as some hardware wants it.")]
Model = Annotated[
    str, typer.Argument(help="A name (`harp list models`), torchvision:NAME, timm:NAME or path/to/file.py:function.")
]
