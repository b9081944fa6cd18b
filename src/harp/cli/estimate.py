"""The command `harp estimate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli.options import (
    RECIPE,
    Channels,
    Classes,
    DataDir,
    Devices,
    Json,
    Keep,
    KeepStates,
    Method,
    Objective,
    Out,
    Set,
    Strategy,
)
from harp.cli.output import echo, print_json
from harp.errors import PROBLEM

Removed = Annotated[str | None, typer.Option(hidden=True)]


def estimate(
    recipe: Annotated[str | None, RECIPE] = None,
    method: Method = None,
    strategy: Strategy = None,
    keep: Keep = None,
    objective: Objective = None,
    channels: Channels = False,
    data_dir: DataDir = None,
    devices: Devices = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each stage to measure, at least.")] = 5,
    images: Annotated[
        str | None, typer.Option(help="Training images, and test images after a comma: 1281167,50000.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Image shape like 3,224,224, where nothing else says it.")] = None,
    classes: Classes = None,
    intensity: Annotated[
        float | None, typer.Option(help="g CO2 / kWh of your electricity; default: the world's mean, 475 (IEA 2019).")
    ] = None,
    keep_states: KeepStates = 2,
    out: Out = Path("runs"),
    changes: Set = [],  # noqa: B006 (typer copies it)
    as_json: Json = False,
    plan: Removed = None,
    hardware: Removed = None,
    precision: Removed = None,
    utilisation: Removed = None,
) -> None:
    """Measure what a recipe takes before it runs: time, memory, disk and energy, from a few steps of each stage.

    Nothing is trained or kept, and the data need not be there.

    Example: harp estimate cifar10/resnet18 --method hydra --keep 1%, as in `harp run`
    """
    from harp.errors import RecipeError
    from harp.experiments import energy
    from harp.experiments.compose import Choice, load
    from harp.experiments.estimate import stages
    from harp.experiments.estimate.sizes import sizes
    from harp.system.progress import Terminal

    if plan or hardware or precision or utilisation:
        raise RecipeError(
            "--plan, --hardware, --precision and --utilisation are gone: run `harp estimate RECIPE` on the machine in "
            "question; docs/how-to/estimate.md has the costs of the paper's experiments"
        )
    if recipe is None:
        raise RecipeError("give a recipe: `harp list recipes` shows those that are shipped")
    display = Terminal()
    loaded = load(recipe, changes, Choice(method, strategy, keep, objective, channels))
    result = stages.estimate(
        loaded,
        sizes(loaded, data_dir, images=images, shape=shape, classes=classes),
        devices=devices,
        steps=steps,
        intensity=energy.INTENSITY if intensity is None else intensity,
        display=display,
        out=out,
        keep_states=keep_states,
    )
    if as_json:
        print_json(result)
    else:
        _show(result, display)
    if result["warnings"]:
        raise typer.Exit(PROBLEM)


def _show(result: dict[str, Any], display: Any) -> None:
    from harp.system.files import amount
    from harp.system.progress import duration

    def times(row: dict[str, Any]) -> list[str]:
        return [duration(row["seconds"]), f"{duration(row['low'])} – {duration(row['high'])}"]

    rows = [
        [
            row["name"],
            str(row["epochs"]),
            f"{row['steps']:,}",
            "–" if row["step"] is None else _seconds(row["step"]) + "*" * row["scaled"],
            amount(row["memory"]),
            *times(row),
        ]
        for row in result["stages"]
    ]
    for row in result["evaluation"]:
        name = f"{row['network']} {row['name']}".strip()
        rows.append([name, "", f"{row['images']:,} images", _seconds(row["an_image"]), "", *times(row)])
    rows.append(["all", "", "", "", "", *times(result)])
    data, needs, energy = result["data"], result["needs"], result["energy"]
    title = f"{result['recipe']}: {data['train']:,} images of {'x'.join(map(str, data['shape']))} on {result['device']}"
    display.table(title, ("part", "epochs", "steps", "a step", "memory", "time", "from – to"), rows)
    free = needs["memory_free"]
    available = f"; {needs['memory_of']} has {amount(free)} free" if free is not None else ""
    echo(f"\nmemory    {amount(needs['memory'])}{available}")
    echo(
        f"disk      {amount(needs['disk'])} (a state of {amount(needs['state'])}, results of "
        f"{amount(needs['results'])}); {amount(needs['disk_free'])} are free"
    )
    grams = f"{energy['co2_g'] / 1e3:,.2f} kg" if energy["co2_g"] >= 1e3 else f"{energy['co2_g']:.3g} g"
    echo(f"energy    {energy['kwh']:.3g} kWh by {energy['by']}, {grams} CO2 at {energy['intensity']:g} g/kWh")
    for note in result["notes"]:
        echo(f"note      {note}")
    for warning in result["warnings"]:
        echo(f"warning   {warning}")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
