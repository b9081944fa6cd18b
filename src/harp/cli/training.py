"""Commands that train: demo, run, prune, compare."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli.options import Accelerator, Budget, Channels, DataDir, Devices, Json, Model, Multiple, Out, Set, Weights


def demo(out: Out = Path("runs"), changes: Set = []) -> None:  # noqa: B006 (typer copies it)
    """Pre-train, prune to 1 % by HARP, fine-tune and attack a small network, in a few minutes on two cores."""
    import torch

    torch.set_num_threads(1)  # so small a network spends more on waking a second thread than it gains
    _run("demo", out, None, changes)


def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped recipe (`harp list recipes`).")],
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    changes: Set = [],  # noqa: B006 (typer copies it)
    devices: Devices = 1,
    accelerator: Accelerator = "auto",
    minutes: Annotated[float, typer.Option(help="Save the state at least this often.")] = 10.0,
) -> None:
    """Run a recipe: train its stages, evaluate, report. Interrupted? The same command goes on where it stopped."""
    _run(recipe, out, data_dir, changes, devices, accelerator, minutes)


def prune(
    model: Model,
    data: Annotated[str, typer.Option(help="Data set: a name (`harp list data`) or a file.npz of your own.")],
    keep: Annotated[
        str, typer.Option(help="Share to keep of the weights, or of the FLOPs of channels: 1%, 0.01 or 1/100.")
    ],
    method: Annotated[str, typer.Option(help="Pruning method (`harp list methods`).")] = "harp",
    strategy: Annotated[
        str | None,
        typer.Option(help="Where the budget goes: uniform, erk, lamp, igq, boosted, blend or global."),
    ] = None,
    channels: Channels = False,
    budget: Budget = None,
    multiple: Multiple = 1,
    weights: Weights = None,
    data_dir: DataDir = None,
    out: Out = Path("runs"),
    objective: Annotated[str, typer.Option(help="Training objective: pgd, trades, mart or natural.")] = "pgd",
    epsilon: Annotated[str | None, typer.Option(help="Attack budget, like 8/255; default: usual for the data.")] = None,
    pretrain: Annotated[int | None, typer.Option(help="Epochs of pre-training (none if weights are given).")] = None,
    prune_epochs: Annotated[int | None, typer.Option("--prune", help="Epochs of pruning.")] = None,
    finetune: Annotated[int | None, typer.Option(help="Epochs of fine-tuning.")] = None,
    batch: Annotated[int, typer.Option(help="Images a batch.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    ignore: Annotated[list[str], typer.Option(help="Layers to leave dense, by name pattern.")] = [],  # noqa: B006 (same)
    changes: Set = [],  # noqa: B006 (typer copies it)
    devices: Devices = 1,
    accelerator: Accelerator = "auto",
) -> None:
    """Prune a model to an exact budget and prove its robustness: a recipe from flags.

    Example: harp prune resnet18 --data cifar10 --data-dir ~/data --keep 1%

    Channels: harp prune resnet18 --data cifar10 --data-dir ~/data --keep 25% --channels
    """
    from harp import presets
    from harp.recipe import parse

    content = presets.recipe(
        model,
        data,
        keep,
        method=method,
        strategy=strategy,
        objective=objective,
        epsilon=epsilon,
        weights=None if weights is None else str(weights),
        epochs=(pretrain, prune_epochs, finetune),
        batch=batch,
        seed=seed,
        ignore=ignore,
        channels=channels,
        budget=budget,
        multiple=multiple,
    )
    _execute(parse(content, changes), out, data_dir, devices, accelerator)


def compare(
    study: Annotated[
        str,
        typer.Argument(
            help="A study or a recipe: a YAML file or a shipped name (`harp list studies`, `list recipes`)."
        ),
    ],
    methods: Annotated[
        str | None, typer.Option(help="Like harp,hydra+lamp,harp:gamma_step=0.1,dense-small (`harp list methods`).")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Shares of the budget to keep, like 10%,1%,0.5%.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, like 0,1,2.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; they share the machine's cores.")] = 1,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    changes: Set = [],  # noqa: B006 (typer copies it)
    as_json: Json = False,
) -> None:
    """Compare methods under one recipe: every method, budget and seed, then a table and a plot with intervals.

    Example: harp compare fashion/harp-99 --methods harp,hydra,magnitude,dense-small --keep 5%,1% --seeds 0,1,2 --jobs 2

    NAME+STRATEGY spreads the budget by a strategy; NAME:option=value sets an option. `dense-small` is a dense network
    with as many weights as the others keep. All train for the same epochs. Interrupted? The same command goes on.
    """
    from harp import standings
    from harp import study as studies
    from harp.compare import Comparison
    from harp.display import Terminal
    from harp.errors import MissingExtra

    display = Terminal()
    planned = studies.load(study, methods=methods, keep=keep, seeds=seeds, changes=changes)
    comparison = Comparison(planned, out, data_dir=data_dir, display=display)
    outcome = comparison.execute(jobs)
    try:
        comparison.draw(outcome)
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    if as_json:
        typer.echo((comparison.folder / "results.json").read_text(encoding="utf-8"))
    else:
        for title, rows in standings.blocks(outcome["rows"], outcome["size"], outcome["unit"]):
            display.table(f"\n{title}", standings.columns(outcome["attack"], outcome["unit"]), rows)
        typer.echo("\n" + "\n".join(standings.notes(outcome)))
        typer.echo(f"files     {comparison.folder}")
    if any(row["failed"] for row in outcome["rows"]):
        raise typer.Exit(1)


def _run(
    name: str,
    out: Path,
    data_dir: Path | None,
    changes: list[str],
    devices: int = 1,
    accelerator: str = "auto",
    minutes: float = 10.0,
) -> None:
    from harp.recipe import load

    _execute(load(name, changes), out, data_dir, devices, accelerator, minutes)


def _execute(
    recipe: Any, out: Path, data_dir: Path | None, devices: int = 1, accelerator: str = "auto", minutes: float = 10.0
) -> None:
    from harp import card, finished, picture, summary
    from harp.display import Quiet, Terminal
    from harp.engine import launch
    from harp.errors import MissingExtra
    from harp.run import Run

    fabric = launch(recipe.precision, accelerator, devices)
    display = Terminal() if fabric.is_global_zero else Quiet()
    logging.getLogger("harp").disabled = not fabric.is_global_zero  # one voice is enough
    work = Run(recipe, out, data_dir=data_dir, display=display, fabric=fabric, minutes=minutes)
    outcome = work.execute()
    if not fabric.is_global_zero:
        return
    told = finished.read(outcome.folder).summary
    layers, kind = told["layers"], summary.budget(told)["kind"]
    display.table(
        "channels" if kind == "channels" else "layers", summary.layer_columns(kind), summary.layer_rows(layers)
    )
    measure = (
        f"\n{recipe.name}: {outcome.results[0]['measure']} on the test set of {recipe.data.name}, seed {recipe.seed}"
    )
    display.table(measure, summary.RESULT_COLUMNS, summary.result_rows(outcome.dense, outcome.results))
    line = summary.headline(told)
    typer.echo(f"\n{line}")
    try:
        for suffix in ("png", "svg"):
            file = outcome.folder / f"layers.{suffix}"
            picture.draw(file, f"{recipe.name}: {line}", layers, work.histories(), kind)
        typer.echo(f"picture   {outcome.folder / 'layers.png'}")
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    typer.echo(f"card      {card.write(outcome.folder)}")
    typer.echo(f"artefact  {outcome.folder / 'model.safetensors'}")
