"""The command `harp shard`."""

from pathlib import Path
from typing import Annotated

import typer


def shard(
    folder: Annotated[Path, typer.Argument(help="A folder with train/<class>/ and test/<class>/ (or val/<class>/).")],
    out: Annotated[Path, typer.Argument(help="The folder that takes the shards.")],
    count: Annotated[int, typer.Option(help="Images a shard.")] = 1000,
    size: Annotated[
        int | None, typer.Option(help="Resize larger images, so that their shorter side has this many pixels.")
    ] = None,
) -> None:
    """Pack a folder of images into tar archives (WebDataset), which are read faster from slow or shared disks.

    Example: harp shard ~/pictures ~/shards --size 256, then data: {name: shards, size: 224} in a recipe.

    Interrupted? The same command goes on with the first shard that is missing.
    """
    from harp.data.webdataset import write_shards
    from harp.system.progress import Terminal

    written = write_shards(folder, out, count=count, size=size, display=Terminal())
    typer.echo(f"{written.images:,} images in {written.shards:,} shards: {out}")
    if written.undecodable:
        typer.echo(f"{len(written.undecodable)} images can't be decoded and were left out", err=True)
