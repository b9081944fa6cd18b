"""The command `harp shard`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from harp.cli import options
from harp.cli.output import echo, print_json
from harp.errors import PROBLEM


def shard(
    folder: Annotated[Path, Argument(help="A folder with train/<class>/ and test/<class>/ (or val/<class>/).")],
    out: Annotated[Path, Argument(help="The folder that takes the shards.")],
    count: Annotated[int, Option(min=1, help="Images a shard.")] = 1000,
    size: Annotated[
        int | None, Option(min=1, help="Resize larger images: their shorter side gets this many pixels.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Pack a folder of images into tar archives (WebDataset), which are read faster from slow or shared disks.

    Example: harp shard ~/pictures ~/shards --size 256, then data: {name: shards, size: 224} in a recipe.

    Interrupted? The same command goes on with the first shard that is missing.
    """
    from harp.data.webdataset import write_shards
    from harp.system.progress import Terminal

    written = write_shards(folder, out, count=count, size=size, display=Terminal())
    if as_json:
        print_json({"folder": str(out), **written._asdict()})
    else:
        echo(f"{written.images:,} images in {written.shards:,} shards: {out}")
    if written.undecodable:
        echo(f"{len(written.undecodable)} images can't be decoded and were left out", err=True)
        raise Exit(PROBLEM)
