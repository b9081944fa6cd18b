"""The command `harp report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harp.cli import options
from harp.cli.output import echo, print_json


def report(
    runs: Annotated[list[Path], Argument(help="Folders of finished runs.")],
    out: Annotated[Path, Option(help="The HTML file; its JSON and Markdown go beside it.")] = Path("report.html"),
    as_json: options.Json = False,
) -> None:
    """Make one HTML page of runs: accuracy, robustness, size, the learned strategy, training, checks. Opens offline.

    Example: harp report runs/mine-0123456789ab runs/other-ba9876543210 --out report.html
    """
    from harp.reports.html import build

    written = build(runs, out)
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return
    for path in written:
        echo(path)
