"""Commands that look before anything is trained: list, plan, doctor."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Annotated, Any

import typer

from harp.cli.options import Budget, Channels, Classes, DataDir, Json, Model, Multiple, Shape, Weights

_PATIENCE = 2.0  # seconds after which somebody wants to know what is being done


def list_(
    what: Annotated[str, typer.Argument(help="methods, models, data, recipes or studies.")],
    as_json: Json = False,
) -> None:
    """List the methods, models, data sets, recipes or studies that HARP knows."""
    from harp import catalogue
    from harp.display import Terminal

    rows = catalogue.rows(what)
    if as_json:
        typer.echo(json.dumps([{"name": name, "description": text} for name, text in rows], indent=2))
    else:
        Terminal().table("", (what, ""), [list(row) for row in rows])


def plan(
    model: Model,
    keep: Annotated[
        str, typer.Option(help="Share to keep of the weights, or of the FLOPs of channels: 0.1% or 1/1000.")
    ],
    strategy: Annotated[str, typer.Option(help="uniform, erk, lamp, igq, boosted, blend or global.")] = "uniform",
    channels: Channels = False,
    budget: Budget = None,
    multiple: Multiple = 1,
    data: Annotated[str | None, typer.Option(help="Data set that decides classes and image shape.")] = None,
    data_dir: DataDir = None,
    weights: Weights = None,
    classes: Classes = None,
    shape: Shape = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Round each layer on its own, as papers do; may miss the budget.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how a strategy spreads a budget over the layers, or over the channels, and what the network would cost."""
    from harp import presets, summary, survey
    from harp.display import Terminal

    display = Terminal()
    share = presets.read_number("keep", keep)
    with _saying(display, "following the channels through the model" * channels):
        units = survey.Subject(model, data, data_dir, weights, classes, shape).units(
            channels=channels, budget=budget, multiple=multiple
        )
    layers = survey.spread(units, strategy, share, as_published=as_published)
    totals = survey.totals(units, [layer["kept"] for layer in layers])
    if as_json:
        found = {words: {"size": before, "kept": after} for words, (before, after) in totals.items()}
        typer.echo(json.dumps({"kind": units.kind, "layers": layers, "totals": found}, indent=2))
        return
    title = f"{model}, {strategy}, keep {keep} of the {units.noun}"
    display.table(title, summary.layer_columns(units.kind), summary.layer_rows(layers))
    if units.noun != units.kind:
        rows = [[words, f"{a:,}", f"{b:,}", f"{b / a:.3%}"] for words, (a, b) in totals.items()]
        display.table("\nthe whole network", ("", "before", "after", "rate"), rows)


def doctor(
    model: Model,
    data: Annotated[str | None, typer.Option(help="Data set to examine it on; default: random images.")] = None,
    data_dir: DataDir = None,
    weights: Weights = None,
    classes: Classes = None,
    shape: Shape = None,
    channels: Annotated[
        bool,
        typer.Option("--channels/--no-channels", help="Look for channels too, which takes a while in large models."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Examine a model: what can be pruned, and whether an attack on it would mean anything."""
    from harp import survey
    from harp.display import Terminal

    display = Terminal()
    with _saying(display, "following the channels through the model (--no-channels leaves that out)" * channels):
        examination = survey.Subject(model, data, data_dir, weights, classes, shape).examination(channels=channels)
    if as_json:
        typer.echo(json.dumps(examination.as_dict(), indent=2))
    else:
        rows = [[layer["name"], f"{layer['size']:,}"] for layer in examination.layers]
        display.table("can be pruned", ("layer", "weights"), rows)
        if examination.left_out:
            display.table("\nleft alone", ("parameter", ""), [list(pair) for pair in examination.left_out.items()])
        _show_channels(display, examination)
        signs = {"good": "✓", "look": "?", "bad": "✗"}
        rows = [[f"{signs[f.verdict]} {f.check}", f.text] for f in examination.findings]
        display.table("\nfindings", ("check", ""), rows)
    if not examination.healthy:
        raise typer.Exit(1)


def _show_channels(display: Any, examination: Any) -> None:
    """The channels that may be pruned, and those that stay."""
    if examination.spaces:
        rows = [
            [
                each["name"],
                f"{each['size']:,}",
                str(len(each["readers"])),
                str(len(each["givers"])),
                f"{each['share']:.1%}",
            ]
            for each in examination.spaces
        ]
        display.table(
            "\nchannels that can be pruned", ("first read by", "channels", "readers", "givers", "FLOPs touched"), rows
        )
    if examination.whole:
        rows = []
        for each in examination.whole:
            first, *others = each["readers"]
            more = f" and {len(others)} more" if others else ""
            rows.append([f"{first}{more}", f"{each['count']:,}", each["reason"]])
        display.table("\nchannels that stay whole", ("read by", "channels", ""), rows)


@contextmanager
def _saying(display: Any, text: str) -> Iterator[None]:
    """Say what is being done, if it takes long."""
    timer = Timer(_PATIENCE, display.note, [text])
    timer.daemon = True
    if text:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
