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

    Verdicts are by 95 % intervals, with tolerances that were fixed before: reproduced, differs, open, not run. Orders
    of methods are judged by paired intervals over seeds. Interrupted? The same command goes on.
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
    _show(chosen, found, out, display, as_json)


def _list(display: Any, as_json: bool) -> None:
    from harp.experiments.reproduction import claim as claims
    from harp.experiments.reproduction import evidence, judge

    rows = []
    for each in claims.shipped().values():
        verdicts = [judge.overall(each, evidence.shipped(each.id, small=small), small=small) for small in (False, True)]
        runs, epochs = each.full.length()
        cost = f"{runs:,} runs, {epochs:,} epochs" if runs else "seconds"
        rows.append([each.id, each.place, each.title, str(verdicts[0]), str(verdicts[1]), cost])
    columns = ("claim", "place", "what", "verdict", "small variant", "full cost")
    if as_json:
        typer.echo(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
        return
    display.table("claims of the HARP paper, judged by the evidence that comes with this version", columns, rows)
    typer.echo("\nharp reproduce CLAIM [--small] runs what is missing and prints the published numbers beside yours.")


def _cost(chosen: Any, small: bool, display: Any, as_json: bool) -> None:
    variant = chosen.variant(small=small)
    runs, epochs = variant.length()
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
            outcome = comparison.execute(jobs, stop=stop)
            for run in outcome["runs"]:
                if run["failed"] is not None:
                    typer.echo(f"failed    {run['name']}: {run['failed']}", err=True)
        comparisons[name] = comparison
    return evidence.collect(chosen, small=small, comparisons=comparisons)


def _show(chosen: Any, found: Any, out: Path, display: Any, as_json: bool) -> None:
    """Print every number and order with its verdict, and write the tables and the figure."""
    from harp.experiments.reproduction import judge
    from harp.reports import claims

    small = found.variant == "small"
    values = [] if small else [line for _, line in judge.values(chosen, found)]
    orders = judge.orders(chosen.variant(small=small).orders, found)
    lines = [*values, *orders, *([] if small else judge.computed(chosen))]
    verdict = judge.overall(chosen, found, small=small)
    folder = out / f"reproduce-{chosen.id}{'-small' if small else ''}"
    claims.write(folder, chosen, found, small=small)
    if as_json:
        keys = ("what", "published", "ours", "verdict")
        cells = [(line.what, line.published, line.ours, line.verdict.state) for line in lines]
        told = {"claim": chosen.id, "small": small, "verdict": str(verdict), "folder": str(folder)}
        typer.echo(json.dumps({**told, "lines": [dict(zip(keys, cell, strict=True)) for cell in cells]}, indent=2))
        return
    for name, rows in claims.tables(chosen, found, small=small).items():
        display.table(f"\n{chosen.place}, {name}: published | ours", tuple(rows[0]), rows[1:])
    table = [[line.what, line.published, line.ours, line.verdict.state.value] for line in lines]
    display.table(f"\n{chosen.title}", ("what", "published", "ours", "verdict"), table)
    typer.echo(f"\nverdict   {verdict}")
    for text in chosen.departures:
        typer.echo(f"departure {text}")
    typer.echo(f"files     {folder}")
    missing = chosen.variant(small=small).length()[0] - len(found.records)
    if missing > 0:
        typer.echo(f"missing   {missing} of the claim's runs; the same command does what is not done")
