"""The command that compares methods: compare."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli.options import BEGAN, DataDir, Devices, Json, MaxMinutes, Out, Set, Workers


def compare(
    study: Annotated[
        str,
        typer.Argument(
            help="A study or a recipe: a YAML file or a shipped name (`harp list studies`, `list recipes`)."
        ),
    ],
    methods: Annotated[
        str | None, typer.Option(help="Like harp,hydra+lamp,harp:reach=0,dense-small (`harp list methods`).")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Shares of the budget to keep, like 10%,1%,0.5%.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, like 0,1,2.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="How methods train: equal (the same epochs for all) or paper (as each was published)."),
    ] = None,
    rank_by: Annotated[str | None, typer.Option(help="The attack that ranks the methods, like pgd-10.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; they share the machine's cores.")] = 1,
    launcher: Annotated[
        str, typer.Option(help="Where the runs are done: local (processes here) or slurm (a job each).")
    ] = "local",
    sbatch: Annotated[
        str, typer.Option(help='SLURM: options of each job, like "--partition=gpu --gres=gpu:1 --time=8:00:00".')
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="SLURM: write the job files, submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="SLURM: wait for the jobs, then write the tables.")] = False,
    devices: Devices = 1,
    workers: Workers = None,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    changes: Set = [],  # noqa: B006 (typer copies it)
    max_minutes: MaxMinutes = None,
    as_json: Json = False,
) -> None:
    """Compare methods under one recipe: every method, budget and seed, then a table and a plot with intervals.

    Example: harp compare fashion/harp-99 --methods harp,hydra,magnitude,dense-small --keep 5%,1% --seeds 0,1,2 --jobs 2

    NAME+STRATEGY spreads the budget by a strategy; NAME:option=value sets an option. `dense-small` is a dense network
    with as many weights as the others keep. All train for the same epochs, or with `--protocol paper` as published.
    Interrupted? The same command goes on.

    On a cluster `--launcher slurm` submits a job a run. The same command again shows how they are, submits what failed,
    and writes the tables when all are finished.
    """
    from harp import study as studies
    from harp.compare import Comparison
    from harp.display import Terminal
    from harp.errors import RecipeError
    from harp.keeper import Stop
    from harp.launchers import scheduler
    from harp.launchers.slurm import Slurm
    from harp.recipe import unknown

    if launcher not in ("local", "slurm"):
        raise RecipeError(unknown("launcher", launcher, ("local", "slurm")))
    if launcher == "local" and (sbatch or dry_run or wait):
        raise RecipeError("--sbatch, --dry-run and --wait are for --launcher slurm")
    if launcher == "slurm" and max_minutes is not None:
        raise RecipeError('--max-minutes is for --launcher local; SLURM limits its jobs by --sbatch "--time=8:00:00"')
    stop = Stop(max_minutes, BEGAN)
    display = Terminal()
    planned = studies.load(
        study, methods=methods, keep=keep, seeds=seeds, rank_by=rank_by, protocol=protocol, changes=changes
    )
    comparison = Comparison(
        planned, out, data_dir=data_dir, display=display, workers=workers, elsewhere=launcher != "local"
    )
    if launcher == "local":
        _show(comparison, comparison.execute(jobs, devices=devices, stop=stop), display, as_json)
        return
    queue = Slurm(comparison.folder, comparison.jobs(devices), sbatch, devices)
    if not dry_run:
        scheduler.require()
    comparison.write_recipes()
    if dry_run:
        written = queue.write()
        typer.echo(f"{len(written)} job files in {comparison.folder / 'jobs'}; nothing was submitted")
        return
    stands = queue.bring()
    failed: dict[str, str] = {}
    if wait and _left(stands):
        failed = queue.wait(display)
    elif _left(stands):
        _show_queue(comparison, stands, display, as_json)
        return
    _show(comparison, comparison.collect(failed), display, as_json)


def _left(stands: list[Any]) -> int:
    from harp.launchers.jobs import State

    return sum(each.state is not State.FINISHED for each in stands)


def _show_queue(comparison: Any, stands: list[Any], display: Any, as_json: bool) -> None:
    """How the jobs stand, and what to do next."""
    if as_json:
        jobs = [{"name": each.name, "state": each.state, "job": each.id, "note": each.note} for each in stands]
        typer.echo(json.dumps({"folder": str(comparison.folder), "jobs": jobs}, indent=2))
        return
    rows = [[each.name, each.id or "–", each.state, each.note] for each in stands]
    display.table("\njobs", ("run", "job", "state", ""), rows)
    submitted = sum(each.note == "submitted" for each in stands)
    typer.echo(f"\n{submitted} submitted, {len(stands) - _left(stands)} of {len(stands)} runs finished")
    typer.echo(f"logs      {comparison.folder / 'logs'}")
    typer.echo("The same command shows how they are, submits what failed, and writes the tables when all are finished.")


def _show(comparison: Any, outcome: dict[str, Any], display: Any, as_json: bool) -> None:
    """The tables and the picture of what all runs came to."""
    from harp import standings
    from harp.errors import MissingExtra

    try:
        comparison.draw(outcome)
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    if as_json:
        typer.echo((comparison.folder / "results.json").read_text(encoding="utf-8"))
    else:
        for title, rows in standings.blocks(outcome):
            display.table(f"\n{title}", standings.columns(outcome["attack"], outcome["unit"]), rows)
        typer.echo("\n" + "\n".join(standings.notes(outcome)))
        typer.echo(f"files     {comparison.folder}")
    if any(row["failed"] for row in outcome["rows"]):
        raise typer.Exit(1)
