"""The commands `harp list`, `harp plan` and `harp doctor`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

import typer

from harp.cli.options import (
    SIGNS,
    Budget,
    Channels,
    Classes,
    DataDir,
    Json,
    Keep,
    Model,
    Multiple,
    Shape,
    Strategy,
    Weights,
)

PATIENCE = 2.0  # seconds after which a slow step is announced


def list_(
    what: Annotated[str, typer.Argument(help="methods, models, data, recipes or studies.")],
    containing: Annotated[str, typer.Argument(help="Only those whose name or description contains this.")] = "",
    as_json: Json = False,
) -> None:
    """List the methods, models, data sets, recipes or studies that HARP knows.

    Example: harp list recipes svhn
    """
    from harp.cli import catalogue
    from harp.system.progress import Terminal

    rows = catalogue.rows(what, containing)
    if as_json:
        typer.echo(json.dumps([{"name": name, "description": text} for name, text in rows], indent=2))
    else:
        Terminal().table("", (what, ""), [list(row) for row in rows])
        if what == "recipes":
            example = next((name for name, _ in rows if "/" in name), rows[0][0])
            options = [list(row) for row in catalogue.axes(example)]
            Terminal().table("\nwhat options put in place of a recipe's own", ("option", ""), options)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model (`harp list models`, torchvision:NAME, timm:NAME, path/to/file.py:function), or a recipe."
        ),
    ],
    keep: Keep = None,
    strategy: Strategy = None,
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
    """Show how a strategy spreads a budget over the layers, or over the channels, and what the network would cost.

    Example: harp plan resnet18 --keep 1% --strategy lamp

    The network, the budget and the strategy of a recipe, unless others are given: harp plan cifar10/vgg16 --keep 0.1%
    """
    from harp.errors import RecipeError
    from harp.experiments import compose, presets
    from harp.experiments.plan import Subject, spread
    from harp.experiments.plan import totals as network_totals
    from harp.reports import tables
    from harp.system.progress import Terminal

    display = Terminal()
    subject, options = Subject(model, data, data_dir, weights, classes, shape), dict[str, Any]()
    if compose.is_recipe(model) or compose.base_of(model) is not None:
        loaded = compose.load(model, choice=compose.Choice(keep=keep, channels=channels))
        subject, options = _of_recipe(loaded, subject)
        pruner = next((stage.pruner for stage in loaded.stages if "keep" in stage.pruner), {})
        keep, channels = keep or pruner.get("keep"), loaded.units.kind == "channels"
        strategy = strategy or pruner.get("strategy") or pruner.get("initial_strategy")
    if keep is None:
        raise RecipeError(f"how much of {model} is to be kept? Say it like --keep 1%")
    strategy, share = strategy or "uniform", presets.read_number("keep", str(keep))
    options |= {"budget": budget} if budget is not None else {}
    options |= {"multiple": multiple} if multiple != 1 else {}
    with saying(display, "following the channels through the model" * channels):
        units = subject.units(channels=channels, **options)
    layers = spread(units, strategy, share, as_published=as_published)
    totals = network_totals(units, [layer["kept"] for layer in layers])
    if as_json:
        sizes = {words: {"size": before, "kept": after} for words, (before, after) in totals.items()}
        typer.echo(json.dumps({"kind": units.kind, "layers": layers, "totals": sizes}, indent=2))
        return
    title = f"{model}, {strategy}, keep {keep} of the {units.noun}"
    display.table(title, tables.layer_columns(units.kind), tables.layer_rows(layers))
    if units.noun != units.kind:
        rows = [[words, f"{a:,}", f"{b:,}", f"{b / a:.3%}"] for words, (a, b) in totals.items()]
        display.table("\nthe whole network", ("", "before", "after", "rate"), rows)


def _of_recipe(loaded: Any, subject: Any) -> tuple[Any, dict[str, Any]]:
    """The network of a recipe as a subject, and the limits of its units."""
    from harp.experiments.estimate.sizes import Sizes

    sizes = Sizes.of(loaded, subject.data_dir) if subject.data_name is None else None
    weights = subject.weights or (Path(loaded.model.weights) if loaded.model.weights else None)
    changed = replace(subject, spec=loaded.model.name, weights=weights, options=loaded.model.options)
    if sizes is not None:
        shape = subject.shape or "x".join(map(str, sizes.shape))
        changed = replace(changed, classes=subject.classes or sizes.classes, shape=shape)
    return changed, loaded.units.options()


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
    from harp.experiments.plan import Subject
    from harp.system.progress import Terminal

    display = Terminal()
    with saying(display, "following the channels through the model (--no-channels leaves that out)" * channels):
        examination = Subject(model, data, data_dir, weights, classes, shape).examination(channels=channels)
    if as_json:
        typer.echo(json.dumps(examination.as_dict(), indent=2))
    else:
        rows = [[layer["name"], f"{layer['size']:,}"] for layer in examination.layers]
        display.table("can be pruned", ("layer", "weights"), rows)
        if examination.left_out:
            display.table("\nleft alone", ("parameter", ""), [list(pair) for pair in examination.left_out.items()])
        _show_channels(display, examination)
        rows = [[f"{SIGNS[f.verdict]} {f.check}", f.text] for f in examination.findings]
        display.table("\nfindings", ("check", ""), rows)
    if not examination.healthy:
        raise typer.Exit(1)


def _show_channels(display: Any, examination: Any) -> None:
    """Show the channels that can be pruned, and those that stay whole."""
    if examination.spaces:
        rows = [
            [
                space["name"],
                f"{space['size']:,}",
                str(len(space["readers"])),
                str(len(space["givers"])),
                f"{space['share']:.1%}",
            ]
            for space in examination.spaces
        ]
        display.table(
            "\nchannels that can be pruned", ("first read by", "channels", "readers", "givers", "FLOPs touched"), rows
        )
    if examination.whole:
        rows = []
        for space in examination.whole:
            first, *others = space["readers"]
            more = f" and {len(others)} more" if others else ""
            rows.append([f"{first}{more}", f"{space['count']:,}", space["reason"]])
        display.table("\nchannels that stay whole", ("read by", "channels", ""), rows)


@contextmanager
def saying(display: Any, text: str) -> Iterator[None]:
    """Print a note if the block takes long; an empty text prints nothing."""
    timer = Timer(PATIENCE, display.note, [text])
    timer.daemon = True
    if text:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
