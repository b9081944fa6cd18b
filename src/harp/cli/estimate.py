"""The command `harp estimate`."""

import json
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


def estimate(
    recipe: Annotated[str | None, RECIPE] = None,
    method: Method = None,
    strategy: Strategy = None,
    keep: Keep = None,
    objective: Objective = None,
    channels: Channels = False,
    data_dir: DataDir = None,
    devices: Devices = 1,
    steps: Annotated[int, typer.Option(help="Steps of each stage to measure, at least.")] = 5,
    images: Annotated[
        str | None, typer.Option(help="Training images, and test images after a comma: 1281167,50000.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Image shape like 3,224,224, where nothing else says it.")] = None,
    classes: Classes = None,
    intensity: Annotated[
        float | None, typer.Option(help="g CO2 / kWh of your electricity; default: the world's mean, 475 (IEA 2019).")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="Instead of a recipe, a plan of many: `paper` is all of the HARP paper.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="For a plan: a GPU and how many, like a100x8, or a YAML file that describes one.")
    ] = "a100",
    precision: Annotated[
        str | None, typer.Option(help="For a plan: f32, tf32 or bf16; default: bf16 where the GPU has it.")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(help="For a plan: the share of the GPU's peak that is reached, like 0.2.")
    ] = None,
    keep_states: KeepStates = 2,
    out: Out = Path("runs"),
    changes: Set = [],  # noqa: B006 (typer copies it)
    as_json: Json = False,
) -> None:
    """Say what a recipe takes before it runs: time, memory, disk and energy, from a few measured steps.

    Nothing is trained or kept, and the data need not be there.

    Example: harp estimate cifar10/resnet18 --method hydra --keep 1%, as in `harp run`

    A plan is not measured but counted: harp estimate --plan paper --hardware a100x8
    """
    from harp.errors import RecipeError
    from harp.experiments import energy
    from harp.experiments.compose import Choice, load
    from harp.experiments.estimate import stages
    from harp.system.progress import Terminal

    display = Terminal()
    grams = energy.INTENSITY if intensity is None else intensity
    if (recipe is None) == (plan is None):
        raise RecipeError("give a recipe or --plan, one of them")
    if plan is not None:
        from harp.experiments.estimate.plan import estimate as estimate_plan

        result = estimate_plan(plan, hardware, precision, utilisation, intensity=grams, display=display)
        _print(result, as_json, lambda: _show_plan(result, display))
        return
    from harp.experiments.estimate.known import sizes

    loaded = load(str(recipe), changes, Choice(method, strategy, keep, objective, channels))
    data_sizes = sizes(loaded, data_dir, images=images, shape=shape, classes=classes)
    result = stages.estimate(
        loaded,
        data_sizes,
        devices=devices,
        steps=steps,
        intensity=grams,
        display=display,
        out=out,
        keep_states=keep_states,
    )
    _print(result, as_json, lambda: _show(result, display))


def _print(result: dict[str, Any], as_json: bool, show: Any) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        show()


def _show(result: dict[str, Any], display: Any) -> None:
    from harp.system.files import amount
    from harp.system.progress import duration

    rows = [
        [
            row["name"],
            str(row["epochs"]),
            f"{row['steps']:,}",
            "–" if row["step"] is None else _seconds(row["step"]) + "*" * row["scaled"],
            "–" if row["gflops"] is None else f"{row['gflops']:.1f}",
            amount(row["memory"]),
            duration(row["seconds"]),
            f"{duration(row['low'])} – {duration(row['high'])}",
        ]
        for row in result["stages"]
    ]
    for row in result["evaluation"]:
        cells = ["", f"{row['images']:,} images", _seconds(row["an_image"]), "", ""]
        times = [duration(row["seconds"]), f"{duration(row['low'])} – {duration(row['high'])}"]
        rows.append([f"{row['network']} {row['name']}".strip(), *cells, *times])
    rows.append(
        ["all", *[""] * 5, duration(result["seconds"]), f"{duration(result['low'])} – {duration(result['high'])}"]
    )
    data, needs, energy = result["data"], result["needs"], result["energy"]
    title = f"{result['recipe']}: {data['train']:,} images of {'x'.join(map(str, data['shape']))} on {result['device']}"
    display.table(title, ("part", "epochs", "steps", "a step", "GFLOP/s", "memory", "time", "from – to"), rows)
    free = needs["memory_free"]
    available = f"; {needs['memory_of']} has {amount(free)} free" if free is not None else ""
    typer.echo(f"\nmemory    {amount(needs['memory'])}{available}")
    typer.echo(
        f"disk      {amount(needs['disk'])} (a state of {amount(needs['state'])}, results of "
        f"{amount(needs['results'])}); {amount(needs['disk_free'])} are free"
    )
    typer.echo(
        f"energy    {energy['kwh']:.3g} kWh by {energy['by']}, {_grams(energy['co2_g'])} CO2 at "
        f"{energy['intensity']:g} g/kWh"
    )
    for note in result["notes"]:
        typer.echo(f"note      {note}")
    for warning in result["warnings"]:
        typer.echo(f"warning   {warning}")


def _show_plan(result: dict[str, Any], display: Any) -> None:
    rows = [
        [
            row["name"],
            str(row["runs"]),
            str(row["stages"]),
            f"{row['flop'] / 1e18:,.2f}",
            f"{row['gpu_hours']:,.1f}",
            f"{row['kwh']:,.1f}",
            _grams(row["co2_g"]),
        ]
        for row in [*result["parts"], {"name": "all", **result["total"]}]
    ]
    heads = ("experiment", "runs", "stages", "EFLOP", "GPU hours", "kWh", "CO2")
    display.table(f"{result['plan']} on {result['hardware']['words']}", heads, rows)
    days = result["total"]["days"]
    typer.echo(f"\n{days:,.1f} days on {result['hardware']['count']} GPUs, if none of them ever waits")
    for note in result["assumptions"]:
        typer.echo(f"note      {note}")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _grams(value: float) -> str:
    return f"{value / 1e6:,.2f} t" if value >= 1e6 else f"{value / 1e3:,.2f} kg" if value >= 1e3 else f"{value:.3g} g"
