"""The command `harp run`, and how a recipe is run and its results are shown."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from harp.cli import options, processes
from harp.cli.output import echo, print_json
from harp.errors import AT_CHANCE
from harp.system.distributed.environment import Machines

if TYPE_CHECKING:
    from harp.experiments.compose import Choice
    from harp.experiments.recipe import Recipe


def run(
    recipe: Annotated[str, options.RECIPE],
    method: options.Method = None,
    strategy: options.Strategy = None,
    keep: options.Keep = None,
    objective: options.Objective = None,
    channels: options.Channels = False,
    protocol: Annotated[
        str,
        Option(help="Epochs of another method: equal (the same for all), given (the base's) or paper (as published)."),
    ] = "equal",
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    changes: options.Set = [],  # noqa: B006 (typer copies it)
    devices: options.Devices = 1,
    accelerator: options.Accelerator = "auto",
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    main_address: options.MainAddress = None,
    minutes: options.Minutes = 10.0,
    keep_states: options.KeepStates = 2,
    max_minutes: options.MaxMinutes = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
) -> None:
    """Run a recipe: train its stages, evaluate, report. Interrupted? The same command goes on where it stopped.

    A base is a data set, a model and their training; the method, its strategy, the budget and the objective are
    options. What is not given stays as in the base.

    Example: harp run cifar10/vgg16 --method hydra --strategy lamp --keep 0.1% --objective trades

    The same in one word, by what is pruned: harp run cifar10/vgg16/hydra-lamp-trades-99.9

    A one-shot method spends the base's epochs of pruning on fine-tuning, as the names of recipes say; with `--protocol
    given` it trains as long as the base's stages. `--set stages.finetune.epochs=4` says it outright.

    Channels, to a quarter of the FLOPs: harp run fashion --keep 25% --channels
    """
    from harp.experiments.compose import Choice, load

    chosen = None if protocol == "equal" else protocol  # nothing replaces a file's own stages unless it is chosen
    choice = Choice(method, strategy, keep, objective, channels, chosen)
    loaded = load(recipe, changes, choice)
    machines = Machines(devices, accelerator, nodes, node_rank, main_address)
    note = "" if chosen else _longer(loaded, recipe, changes, choice)
    execute(loaded, out, data_dir, machines, minutes, keep_states, max_minutes, workers, note, as_json=as_json)


def _longer(loaded: "Recipe", recipe: str, changes: Sequence[str], choice: "Choice") -> str:
    """A note if the protocol makes a stage longer than the base has it; a recipe that is a file is as it is written."""
    from harp.experiments.compose import load

    if Path(recipe).is_file() and choice.method is None:
        return ""
    given = load(recipe, changes, replace(choice, protocol="given"))
    if [stage.epochs for stage in given.stages] == [stage.epochs for stage in loaded.stages]:
        return ""
    lengths = ", ".join(f"{stage.name} {stage.epochs}" for stage in loaded.stages)
    return f"epochs: {lengths}, as many in all as other methods have; --protocol given spends none in place of pruning"


def execute(
    recipe: "Recipe",
    out: Path,
    data_dir: Path | None,
    machines: Machines,
    minutes: float = 10.0,
    keep_states: int = 2,
    max_minutes: float | None = None,
    workers: int | None = None,
    note: str = "",
    *,
    as_json: bool = False,
) -> None:
    """Run a recipe and print its results; `note` is printed before it starts."""
    from harp.errors import MissingExtra
    from harp.experiments import run_folder
    from harp.experiments.run import Run
    from harp.reports import card, names, plots, tables
    from harp.system.distributed.fabric import launch
    from harp.system.interrupt import Stop

    stop = Stop(max_minutes, options.BEGAN)
    fabric = launch(recipe.precision, **vars(machines))
    display = processes.display(fabric.is_global_zero)
    prepared = Run(
        recipe,
        out,
        data_dir=data_dir,
        display=display,
        fabric=fabric,
        minutes=minutes,
        keep_states=keep_states,
        stop=stop,
        workers=workers,
    )
    if note:
        display.note(note)
    outcome = prepared.execute()
    if not fabric.is_global_zero:
        return
    summary = run_folder.read(outcome.folder).summary
    layers, kind = summary["layers"], run_folder.budget_of(summary)["kind"]
    headline = tables.headline(summary)
    picture = outcome.folder / "layers.png"
    try:
        shown = "\n".join([names.run(recipe), headline, *summary["warnings"]])
        plots.draw(outcome.folder, shown, layers, prepared.histories(), kind, warned=bool(summary["warnings"]))
    except MissingExtra as error:
        echo(f"picture   none: {error}", err=True)
    model_card = card.write(outcome.folder)
    if as_json:
        print_json({"folder": str(outcome.folder), **summary})
    else:
        columns = tables.layer_columns(kind)
        display.table("channels" if kind == "channels" else "layers", columns, tables.layer_rows(layers))
        measure, data = outcome.results[0]["measure"], Path(recipe.data.name).name
        title = f"\n{recipe.name}: {measure} on the test set of {data}, seed {recipe.seed}"
        display.table(title, tables.RESULT_COLUMNS, tables.result_rows(outcome.dense, outcome.results))
        echo(f"\n{headline}")
        for warning in summary["warnings"]:
            echo(f"warning: {warning}")
        if picture.exists():
            echo(f"picture   {picture}")
        echo(f"card      {model_card}")
        echo(f"artefact  {outcome.folder / 'model.safetensors'}")
    if summary["at_chance"]:
        echo(f"warning: {summary['warnings'][0]} All files are kept; the exit code is {AT_CHANCE}.", err=True)
        raise Exit(AT_CHANCE)
