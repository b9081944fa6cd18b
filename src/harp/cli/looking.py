"""Commands that look before anything is trained: list, plan, doctor."""

import json
from typing import Annotated

import typer

from harp.cli.options import Classes, DataDir, Json, Model, Shape, Weights


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
    keep: Annotated[str, typer.Option(help="Share of the weights to keep: 0.1%, 0.001 or 1/1000.")],
    strategy: Annotated[str, typer.Option(help="uniform, erk, lamp, igq, boosted, blend or global.")] = "uniform",
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
    """Show how a strategy spreads a budget over the layers."""
    from harp import presets, summary, survey
    from harp.display import Terminal

    subject = survey.Subject(model, data, data_dir, weights, classes, shape)
    layers = survey.spread(subject.model(), strategy, presets.read_number("keep", keep), as_published=as_published)
    if as_json:
        typer.echo(json.dumps(layers, indent=2))
    else:
        Terminal().table(f"{model}, {strategy}, keep {keep}", summary.LAYER_COLUMNS, summary.layer_rows(layers))


def doctor(
    model: Model,
    data: Annotated[str | None, typer.Option(help="Data set to examine it on; default: random images.")] = None,
    data_dir: DataDir = None,
    weights: Weights = None,
    classes: Classes = None,
    shape: Shape = None,
    as_json: Json = False,
) -> None:
    """Examine a model: what can be pruned, and whether an attack on it would mean anything."""
    from harp import survey
    from harp.display import Terminal

    examination = survey.Subject(model, data, data_dir, weights, classes, shape).examination()
    if as_json:
        typer.echo(json.dumps(examination.as_dict(), indent=2))
    else:
        display = Terminal()
        rows = [[layer["name"], f"{layer['size']:,}"] for layer in examination.layers]
        display.table("can be pruned", ("layer", "weights"), rows)
        if examination.left_out:
            display.table("\nleft alone", ("parameter", ""), [list(pair) for pair in examination.left_out.items()])
        signs = {"good": "✓", "look": "?", "bad": "✗"}
        rows = [[f"{signs[f.verdict]} {f.check}", f.text] for f in examination.findings]
        display.table("\nfindings", ("check", ""), rows)
    if not examination.healthy:
        raise typer.Exit(1)
