"""Options that several commands take, and their words."""

from pathlib import Path
from typing import Annotated

import typer

SIGNS = {"good": "✓", "look": "?", "bad": "✗"}
"""How verdicts are marked in tables."""

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder that holds the data set's published files.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for runs; finished stages in it are reused.")]
Set = Annotated[
    list[str], typer.Option("--set", help="Change a value of the recipe, like stages.prune.epochs=5; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Devices = Annotated[int, typer.Option(help="Processes (and GPUs) to train on.")]
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
Multiple = Annotated[int, typer.Option(help="Keep a multiple of so many channels, as some hardware wants it.")]
Model = Annotated[
    str, typer.Argument(help="A name (`harp list models`), torchvision:NAME, timm:NAME or path/to/file.py:function.")
]
