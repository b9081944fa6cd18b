"""The command `harp doctor`."""

from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from harp.cli import options
from harp.cli.output import note_if_slow, print_json, show_findings, show_table
from harp.errors import PROBLEM

if TYPE_CHECKING:
    from harp.evaluation.model_checks import Examination
    from harp.system.progress import Quiet


def doctor(
    model: options.Model,
    data: Annotated[
        str | None, Option(help="Data to examine it on: a name, a folder or a file.npz; default: random images.")
    ] = None,
    data_dir: options.DataDir = None,
    weights: options.Weights = None,
    classes: options.Classes = None,
    shape: options.Shape = None,
    size: options.Size = None,
    normalize: options.Normalize = None,
    channels: Annotated[
        bool, Option("--channels/--no-channels", help="Look for channels too; slow for large models.")
    ] = True,
    as_json: options.Json = False,
) -> None:
    """Examine a model: what can be pruned, and whether an attack on it would mean anything.

    Example: harp doctor path/to/model.py:build --data cifar10 --data-dir ~/data

    The exit code is 1 if a check finds something bad.
    """
    from harp.experiments.plan import Subject
    from harp.system.progress import Terminal

    display = Terminal()
    with note_if_slow(display, "following the channels through the model (--no-channels leaves that out)" * channels):
        examination = Subject(
            model, data, data_dir, weights, classes, shape, size=size, normalize=normalize
        ).examination(channels=channels)
    if as_json:
        print_json(examination.as_dict())
    else:
        _show(display, examination)
    if not examination.healthy:
        raise Exit(PROBLEM)


def _show(display: "Quiet", examination: "Examination") -> None:
    show_table(display, "can be pruned", {"layer": "{name}", "weights": "{size:,}"}, examination.layers)
    if examination.left_out:
        whole = sum(layer["size"] for layer in examination.layers) + sum(examination.left_sizes.values())
        rows = [
            [name, f"{size:,}", f"{size / max(1, whole):.1%}", examination.left_out[name]]
            for name, size in examination.left_sizes.items()
        ]
        display.table("\nleft alone", ("parameter", "weights", "of all", ""), rows)
    if examination.spaces:
        columns = ("first read by", "channels", "readers", "givers", "FLOPs touched")
        rows = [
            [s["name"], f"{s['size']:,}", str(len(s["readers"])), str(len(s["givers"])), f"{s['share']:.1%}"]
            for s in examination.spaces
        ]
        display.table("\nchannels that can be pruned", columns, rows)
    if examination.whole:
        more = [f" and {len(space['readers']) - 1} more" * (len(space["readers"]) > 1) for space in examination.whole]
        rows = [
            [space["readers"][0] + text, f"{space['count']:,}", space["reason"]]
            for space, text in zip(examination.whole, more, strict=True)
        ]
        display.table("\nchannels that stay whole", ("read by", "channels", ""), rows)
    show_findings(display, "findings", map(vars, examination.findings))
