"""The command `harp push`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harp.cli import options
from harp.cli.output import echo, print_json


def push(
    run: Annotated[Path, Argument(help="The folder of a finished run.")],
    repository: Annotated[str, Argument(help="OWNER/NAME on the Hugging Face Hub; OWNER/NAME@BRANCH for a branch.")],
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    license: Annotated[str | None, Option(help="As the hub names licences, like apache-2.0.")] = None,
    as_json: options.Json = False,
) -> None:
    """Publish a run on the Hugging Face Hub: its network, its sparse file, and its card with what was measured.

    Everybody can then use it by name: harp evaluate hf:OWNER/NAME, harp.load("hf:OWNER/NAME").

    Log in first with `hf auth login`, or set HF_TOKEN.

    Example: harp push runs/mine-0123456789ab me/robust-resnet18 --license apache-2.0
    """
    from harp.deploy import sharing

    name = f"hf:{repository.removeprefix('hf:')}"
    address = sharing.push(run, name, private=private, license=license)
    if as_json:
        print_json({"repository": name, "commit": address})
        return
    echo(f"pushed    {name} ({address})")
