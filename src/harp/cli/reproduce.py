"""The command `harp reproduce`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli.options import BEGAN, DataDir, Json, MaxMinutes, Out


def reproduce(
    claim: Annotated[str | None, typer.Argument(help="A claim of the list that `harp reproduce` prints.")] = None,
    small: Annotated[bool, typer.Option("--small", help="The small variant, which runs on a small machine.")] = False,
    seeds: Annotated[str | None, typer.Option(help="Other seeds than the claim's, like 1,2.")] = None,
    cost: Annotated[
        bool, typer.Option("--cost", help="Say how many runs and epochs it takes, and run nothing.")
    ] = False,
    check: Annotated[
        Path | None, typer.Option(help="Judge these runs (a folder) or this evidence (a file), and run nothing.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Write what was measured to this file, to hand it in.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; they share the machine's cores.")] = 1,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    max_minutes: MaxMinutes = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the HARP paper: run what is missing, then judge it against what was published.

    Example: harp reproduce                              the claims, what we found, and what they cost
    Example: harp reproduce ablation --small --jobs 2    minutes a run; the order of methods is judged
    Example: harp reproduce overview --data-dir DIR      the paper's own experiment, for GPUs
    Example: harp reproduce overview --check runs/       judge runs that were made elsewhere

    Verdicts are by 95 % intervals, with tolerances that were fixed before: reproduced, differs, open, not run. Orders of
    methods are judged by paired intervals over seeds. Interrupted? The same command goes on.
    """
    from harp.errors import RecipeError
    from harp.experiments.reproduction import claim as claims
    from harp.system.progress import Terminal

    display = Terminal()
    if claim is None:
        given = {"--small": small, "--seeds": seeds, "--check": check, "--bundle": bundle}
        wrong = [name for name, value in given.items() if value]
        if wrong:
            raise RecipeError(f"{wrong[0]} needs a claim: `harp reproduce` lists them")
        _list(display, as_json)
        return
    chosen = claims.named(claim)
    if cost:
        _cost(chosen, small, display, as_json)
        return
    found = _evidence(chosen, small, seeds, check, jobs, out, data_dir, max_minutes, display)
    if bundle is not None:
        found.write(bundle)
        typer.echo(f"bundle    {bundle}", err=as_json)
    _show(chosen, found, small, out, display, as_json)


def _list(display: Any, as_json: bool) -> None:
    from harp.experiments.reproduction import claim as claims
    from harp.experiments.reproduction import evidence, judge

    rows = []
    for each in claims.shipped().values():
        verdicts = [judge.overall(each, evidence.shipped(each.id, small=small), small=small) for small in (False, True)]
        runs, epochs = _length(each, small=False)
        cost = f"{runs:,} runs, {epochs:,} epochs" if runs else "seconds"
        rows.append([each.id, each.place, each.title, str(verdicts[0]), str(verdicts[1]), cost])
    columns = ("claim", "place", "what", "verdict", "small variant", "full cost")
    if as_json:
        typer.echo(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
        return
    display.table("claims of the HARP paper, judged by the evidence that comes with this version", columns, rows)
    typer.echo("\nharp reproduce CLAIM [--small] runs what is missing and prints the published numbers beside yours.")


def _length(chosen: Any, *, small: bool) -> tuple[int, int]:
    """Runs and epochs of a variant, every seed; shared pre-training counts once."""
    variant = chosen.small if small else chosen.full
    runs = epochs = 0
    for name, experiment in (variant.experiments if variant else {}).items():
        recipes = experiment.recipes(name)
        dense = sum(stage.epochs for stage in recipes["dense", None].stages) if ("dense", None) in recipes else 0
        lengths = [sum(stage.epochs for stage in recipe.stages) for recipe in recipes.values()]
        starts = [recipe.stages[0].pruner["name"] == "dense" for recipe in recipes.values()]
        own = [
            length - dense if start and length > dense else length
            for length, start in zip(lengths, starts, strict=True)
        ]
        runs += len(recipes) * len(experiment.seeds)
        epochs += sum(own) * len(experiment.seeds)
    return runs, epochs


def _cost(chosen: Any, small: bool, display: Any, as_json: bool) -> None:
    variant = chosen.variant(small=small)
    runs, epochs = _length(chosen, small=small)
    if as_json:
        typer.echo(json.dumps({"claim": chosen.id, "small": small, "runs": runs, "epochs": epochs}))
        return
    rows = [
        [name, e.recipe if isinstance(e.recipe, str) else "its own", len(e.methods), ", ".join(e.keep), len(e.seeds)]
        for name, e in variant.experiments.items()
    ]
    display.table(chosen.title, ("experiment", "recipe", "methods", "keep", "seeds"), [list(map(str, r)) for r in rows])
    typer.echo(
        f"\n{runs:,} runs, {epochs:,} epochs; `harp estimate RECIPE` measures what an epoch takes on your machine."
    )


def _evidence(
    chosen: Any,
    small: bool,
    seeds: str | None,
    check: Path | None,
    jobs: int,
    out: Path,
    data_dir: Path | None,
    max_minutes: float | None,
    display: Any,
) -> Any:
    """What the runs measured: those of a folder, of a file, or those that are made now."""
    from harp.errors import CheckpointError, RecipeError
    from harp.experiments.compare import Comparison
    from harp.experiments.reproduction import evidence
    from harp.system.interrupt import Stop

    if check is not None and check.is_file():
        found = evidence.read(check)
        wrong = evidence.problems(found, chosen)
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise CheckpointError(f"{check}: {wrong[0]}{more}")
        return found
    if check is not None and not check.is_dir():
        raise RecipeError(f"--check {check}: give a folder of runs or a file that --bundle wrote")
    numbers = None
    if seeds is not None:
        try:
            numbers = tuple(int(text) for text in seeds.split(","))
        except ValueError as error:
            raise RecipeError(f"--seeds {seeds}: give whole numbers like 1,2") from error
    stop = Stop(max_minutes, BEGAN)
    comparisons = {}
    for name, experiment in chosen.variant(small=small).experiments.items():
        planned = experiment.study(f"{chosen.id}-{name}", numbers)
        comparison = Comparison(planned, check or out, data_dir=data_dir, display=display)
        if check is None:
            comparison.execute(jobs, stop=stop)
        comparisons[name] = comparison
    return evidence.collect(chosen, small=small, comparisons=comparisons)


def _show(chosen: Any, found: Any, small: bool, out: Path, display: Any, as_json: bool) -> None:
    """Print every number and order with its verdict, and write the tables."""
    from harp.experiments.reproduction import judge

    small = found.variant == "small"
    values = [] if small else [line for _, line in judge.values(chosen, found)]
    orders = judge.orders((chosen.small if small else chosen.full).orders, found)
    lines = [*values, *orders, *([] if small else judge.computed(chosen))]
    verdict = judge.overall(chosen, found, small=small)
    if as_json:
        rows = [
            {"what": line.what, "published": line.published, "ours": line.ours, "verdict": line.verdict.state}
            for line in lines
        ]
        typer.echo(json.dumps({"claim": chosen.id, "small": small, "verdict": str(verdict), "lines": rows}, indent=2))
        return
    table = [[line.what, line.published, line.ours, line.verdict.state.value] for line in lines]
    display.table(f"\n{chosen.place}: {chosen.title}", ("what", "published", "ours", "verdict"), table)
    typer.echo(f"\nverdict   {verdict}")
    for text in chosen.departures:
        typer.echo(f"departure {text}")
