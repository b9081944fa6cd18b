"""Commands that train: demo, run, prune."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli import voice
from harp.cli.options import (
    BEGAN,
    Accelerator,
    Budget,
    Channels,
    DataDir,
    Devices,
    KeepStates,
    MainAddress,
    MaxMinutes,
    Minutes,
    Model,
    Multiple,
    NodeRank,
    Nodes,
    Out,
    Set,
    Weights,
    Workers,
)
from harp.errors import AT_CHANCE
from harp.processes.placement import Machines


@dataclass(frozen=True)
class Care:
    """How a training is kept: minutes between two states, states that stay, minutes until it must have ended.

    And how it is fed: processes that decode images ahead.
    """

    minutes: float = 10.0
    states: int = 2
    limit: float | None = None
    workers: int | None = None


def demo(out: Out = Path("runs"), changes: Set = []) -> None:  # noqa: B006 (typer copies it)
    """Pre-train, prune to 1 % by HARP, fine-tune and attack a small network, in a few minutes on two cores.

    Exit code 3: finished, but the network answers at chance level.
    """
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
    nodes: Nodes = 1,
    node_rank: NodeRank = 0,
    main_address: MainAddress = None,
    minutes: Minutes = 10.0,
    keep_states: KeepStates = 2,
    max_minutes: MaxMinutes = None,
    workers: Workers = None,
) -> None:
    """Run a recipe: train its stages, evaluate, report. Interrupted? The same command goes on where it stopped.

    Exit code 3: finished, but the network answers at chance level.
    """
    machines = Machines(devices, accelerator, nodes, node_rank, main_address)
    _run(recipe, out, data_dir, changes, machines, Care(minutes, keep_states, max_minutes, workers))


def prune(
    model: Model,
    data: Annotated[str, typer.Option(help="Data set: a name (`harp list data`) or a file.npz of your own.")],
    keep: Annotated[
        str, typer.Option(help="Share to keep of the weights, or of the FLOPs of channels: 1%, 0.01 or 1/100.")
    ],
    method: Annotated[
        str | None,
        typer.Option(help="Pruning method (`harp list methods`); default: tandem, or magnitude for channels."),
    ] = None,
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
    objective: Annotated[
        str, typer.Option(help="Training objective: pgd, trades, mart, fast, free or natural.")
    ] = "pgd",
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
    nodes: Nodes = 1,
    node_rank: NodeRank = 0,
    main_address: MainAddress = None,
    minutes: Minutes = 10.0,
    keep_states: KeepStates = 2,
    max_minutes: MaxMinutes = None,
    workers: Workers = None,
) -> None:
    """Prune a model to an exact budget and prove its robustness: a recipe from flags.

    Example: harp prune resnet18 --data cifar10 --data-dir ~/data --keep 1%

    Channels: harp prune resnet18 --data cifar10 --data-dir ~/data --keep 25% --channels

    Exit code 3: finished, but the network answers at chance level.
    """
    from harp import presets
    from harp.recipe import parse

    best = presets.BEST["channels" if channels else "weights"]
    content = presets.recipe(
        model,
        data,
        keep,
        method=method or best,
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
    machines = Machines(devices, accelerator, nodes, node_rank, main_address)
    note = f"method: {best}, the best measured (benchmarks/README.md); --method names another"
    care = Care(minutes, keep_states, max_minutes, workers)
    _execute(parse(content, changes), out, data_dir, machines, care, note if method is None else "")


def _run(
    name: str,
    out: Path,
    data_dir: Path | None,
    changes: list[str],
    machines: Machines = Machines(),  # noqa: B008 (it never changes)
    care: Care = Care(),  # noqa: B008 (same)
) -> None:
    from harp.recipe import load

    _execute(load(name, changes), out, data_dir, machines, care)


def _execute(recipe: Any, out: Path, data_dir: Path | None, machines: Machines, care: Care, note: str = "") -> None:
    """Run a recipe and tell how it went; `note` is said before it starts."""
    from harp import card, finished, picture, summary
    from harp.errors import MissingExtra
    from harp.keeper import Stop
    from harp.processes.engine import launch
    from harp.run import Run

    stop = Stop(care.limit, BEGAN)
    fabric = launch(recipe.precision, **vars(machines))
    display = voice.display(fabric.is_global_zero)
    keeping: dict[str, Any] = {"minutes": care.minutes, "keep_states": care.states, "stop": stop}
    keeping["workers"] = care.workers
    work = Run(recipe, out, data_dir=data_dir, display=display, fabric=fabric, **keeping)
    if note:
        display.note(note)
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
    for warning in told["warnings"]:
        typer.echo(f"warning: {warning}")
    try:
        for suffix in ("png", "svg"):
            file = outcome.folder / f"layers.{suffix}"
            picture.draw(file, f"{recipe.name}: {line}", layers, work.histories(), kind)
        typer.echo(f"picture   {outcome.folder / 'layers.png'}")
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    typer.echo(f"card      {card.write(outcome.folder)}")
    typer.echo(f"artefact  {outcome.folder / 'model.safetensors'}")
    if told["at_chance"]:
        typer.echo(f"warning: {told['warnings'][0]} All files are kept; the exit code is {AT_CHANCE}.", err=True)
        raise typer.Exit(AT_CHANCE)
