"""The commands `harp demo`, `harp run` and `harp prune`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harp.cli import ranks
from harp.cli.options import (
    BEGAN,
    KEEP,
    OBJECTIVE,
    RECIPE,
    Accelerator,
    Budget,
    Channels,
    DataDir,
    Devices,
    Keep,
    KeepStates,
    MainAddress,
    MaxMinutes,
    Method,
    Minutes,
    Model,
    Multiple,
    NodeRank,
    Nodes,
    Objective,
    Out,
    Set,
    Strategy,
    Weights,
    Workers,
)
from harp.errors import AT_CHANCE

if TYPE_CHECKING:
    from harp.experiments.recipe import Recipe
from harp.system.distributed.environment import Machines


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run that do not change its result."""

    minutes: float = 10.0  # between two saved states
    states: int = 2  # that are kept
    limit: float | None = None  # minutes after which the run saves and ends
    workers: int | None = None  # processes that decode images ahead


def demo(out: Out = Path("runs"), changes: Set = []) -> None:  # noqa: B006 (typer copies it)
    """Pre-train, prune to 1 % by HARP, fine-tune and attack a small network, in a few minutes on two cores.

    Exit code 3: finished, but the network answers at chance level.
    """
    import torch

    from harp.experiments.compose import load

    torch.set_num_threads(1)  # for so small a network a second thread costs more than it gains
    _execute(load("demo", changes), out, None, Machines(), RunOptions())


def run(
    recipe: Annotated[str, RECIPE],
    method: Method = None,
    strategy: Strategy = None,
    keep: Keep = None,
    objective: Objective = None,
    channels: Channels = False,
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

    A base is a data set, a model and their training; the method, its strategy, the budget and the objective are
    options. What is not given stays as in the base.

    Example: harp run cifar10/vgg16 --method hydra --strategy lamp --keep 0.1% --objective trades

    The same in one word, by what is pruned: harp run cifar10/vgg16/hydra-lamp-trades-99.9

    Channels, to a quarter of the FLOPs: harp run fashion --keep 25% --channels

    Exit code 3: finished, but the network answers at chance level.
    """
    from harp.experiments.compose import Choice, load

    choice = Choice(method, strategy, keep, objective, channels)
    machines = Machines(devices, accelerator, nodes, node_rank, main_address)
    options = RunOptions(minutes, keep_states, max_minutes, workers)
    _execute(load(recipe, changes, choice), out, data_dir, machines, options)


def prune(
    model: Model,
    data: Annotated[str, typer.Option(help="Data set: a name (`harp list data`) or a file.npz of your own.")],
    keep: Annotated[str, KEEP],
    method: Method = None,
    strategy: Strategy = None,
    channels: Channels = False,
    budget: Budget = None,
    multiple: Multiple = 1,
    weights: Weights = None,
    data_dir: DataDir = None,
    out: Out = Path("runs"),
    objective: Annotated[str, OBJECTIVE] = "pgd",
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

    The method is tandem, or magnitude for channels, unless another is named.

    Exit code 3: finished, but the network answers at chance level.
    """
    from harp.experiments import presets
    from harp.experiments.recipe import parse

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
    options = RunOptions(minutes, keep_states, max_minutes, workers)
    _execute(parse(content, changes), out, data_dir, machines, options, note if method is None else "")


def _execute(
    recipe: "Recipe", out: Path, data_dir: Path | None, machines: Machines, options: RunOptions, note: str = ""
) -> None:
    """Run a recipe and print its results; `note` is printed before it starts."""
    from harp.errors import MissingExtra
    from harp.experiments import run_folder
    from harp.experiments.run import Run
    from harp.reports import card, plots, tables
    from harp.system.distributed.fabric import launch
    from harp.system.interrupt import Stop

    stop = Stop(options.limit, BEGAN)
    fabric = launch(recipe.precision, **vars(machines))
    display = ranks.display(fabric.is_global_zero)
    run = Run(
        recipe,
        out,
        data_dir=data_dir,
        display=display,
        fabric=fabric,
        minutes=options.minutes,
        keep_states=options.states,
        stop=stop,
        workers=options.workers,
    )
    if note:
        display.note(note)
    outcome = run.execute()
    if not fabric.is_global_zero:
        return
    summary = run_folder.read(outcome.folder).summary
    layers, kind = summary["layers"], run_folder.budget_of(summary)["kind"]
    display.table("channels" if kind == "channels" else "layers", tables.layer_columns(kind), tables.layer_rows(layers))
    title = (
        f"\n{recipe.name}: {outcome.results[0]['measure']} on the test set of {recipe.data.name}, seed {recipe.seed}"
    )
    display.table(title, tables.RESULT_COLUMNS, tables.result_rows(outcome.dense, outcome.results))
    headline = tables.headline(summary)
    typer.echo(f"\n{headline}")
    for warning in summary["warnings"]:
        typer.echo(f"warning: {warning}")
    try:
        for suffix in ("png", "svg"):
            file = outcome.folder / f"layers.{suffix}"
            plots.draw(file, f"{recipe.name}: {headline}", layers, run.histories(), kind)
        typer.echo(f"picture   {outcome.folder / 'layers.png'}")
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    typer.echo(f"card      {card.write(outcome.folder)}")
    typer.echo(f"artefact  {outcome.folder / 'model.safetensors'}")
    if summary["at_chance"]:
        typer.echo(f"warning: {summary['warnings'][0]} All files are kept; the exit code is {AT_CHANCE}.", err=True)
        raise typer.Exit(AT_CHANCE)
