"""The command `harp compare`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli.options import BEGAN, Channels, DataDir, Devices, Json, MaxMinutes, Objective, Out, Set, Workers


def compare(
    study: Annotated[
        str,
        typer.Argument(help="A study or a recipe: a name (`harp list studies`, `harp list recipes`) or a YAML file."),
    ],
    methods: Annotated[
        str | None, typer.Option(help="Like harp,hydra+lamp,harp:reach=0,dense-small (`harp list methods`).")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Shares of the budget to keep, like 10%,1%,0.5%.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, like 0,1,2.")] = None,
    objective: Objective = None,
    channels: Channels = False,
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

    Example: harp compare fashion --methods harp,hydra,magnitude,dense-small --keep 5%,1% --seeds 0,1,2 --jobs 2

    NAME+STRATEGY spreads the budget by a strategy; NAME:option=value sets an option. `dense-small` is a dense network
    with as many weights as the others keep. All train for the same epochs, or with `--protocol paper` as published.
    Interrupted? The same command goes on.

    On a cluster `--launcher slurm` submits a job a run. The same command again shows how they are, submits what failed,
    and writes the tables when all are finished.
    """
    from harp.errors import RecipeError
    from harp.experiments.compare import Comparison
    from harp.experiments.compose import Choice
    from harp.experiments.recipe import unknown
    from harp.experiments.slurm import Slurm, require
    from harp.experiments.study import load
    from harp.system.interrupt import Stop
    from harp.system.progress import Terminal

    if launcher not in ("local", "slurm"):
        raise RecipeError(unknown("launcher", launcher, ("local", "slurm")))
    if launcher == "local" and (sbatch or dry_run or wait):
        raise RecipeError("--sbatch, --dry-run and --wait are for --launcher slurm")
    if launcher == "slurm" and max_minutes is not None:
        raise RecipeError('--max-minutes is for --launcher local; SLURM limits its jobs by --sbatch "--time=8:00:00"')
    stop = Stop(max_minutes, BEGAN)
    display = Terminal()
    planned = load(
        study,
        methods=methods,
        keep=keep,
        seeds=seeds,
        rank_by=rank_by,
        protocol=protocol,
        changes=changes,
        choice=Choice(objective=objective, channels=channels),
    )
    comparison = Comparison(
        planned, out, data_dir=data_dir, display=display, workers=workers, elsewhere=launcher != "local"
    )
    if launcher == "local":
        _show(comparison, comparison.execute(jobs, devices=devices, stop=stop), display, as_json)
        return
    queue = Slurm(comparison.folder, comparison.jobs(devices), sbatch, devices)
    if not dry_run:
        require()
    comparison.write_recipes()
    if dry_run:
        written = queue.write()
        typer.echo(f"{len(written)} job files in {comparison.folder / 'jobs'}; nothing was submitted")
        return
    statuses = queue.submit()
    failed: dict[str, str] = {}
    if wait and _left(statuses):
        failed = queue.wait(display)
    elif _left(statuses):
        _show_queue(comparison, statuses, display, as_json)
        return
    _show(comparison, comparison.collect(failed), display, as_json)


def _left(statuses: list[Any]) -> int:
    """The number of unfinished jobs."""
    from harp.experiments.slurm import State

    return sum(job.state is not State.FINISHED for job in statuses)


def _show_queue(comparison: Any, statuses: list[Any], display: Any, as_json: bool) -> None:
    """Show the state of the jobs, and what to do next."""
    if as_json:
        jobs = [{"name": job.name, "state": job.state, "job": job.id, "note": job.note} for job in statuses]
        typer.echo(json.dumps({"folder": str(comparison.folder), "jobs": jobs}, indent=2))
        return
    rows = [[job.name, job.id or "–", job.state, job.note] for job in statuses]
    display.table("\njobs", ("run", "job", "state", ""), rows)
    submitted = sum(job.note == "submitted" for job in statuses)
    typer.echo(f"\n{submitted} submitted, {len(statuses) - _left(statuses)} of {len(statuses)} runs finished")
    typer.echo(f"logs      {comparison.folder / 'logs'}")
    typer.echo("The same command shows how they are, submits what failed, and writes the tables when all are finished.")


def _show(comparison: Any, outcome: dict[str, Any], display: Any, as_json: bool) -> None:
    """Draw the plot and print the tables of all runs."""
    from harp.errors import MissingExtra
    from harp.experiments import table
    from harp.reports import plots

    try:
        plots.draw_study(comparison.folder, outcome)
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    if as_json:
        typer.echo((comparison.folder / "results.json").read_text(encoding="utf-8"))
    else:
        for title, rows in table.blocks(outcome):
            display.table(f"\n{title}", table.columns(outcome["attack"], outcome["unit"]), rows)
        typer.echo("\n" + "\n".join(table.notes(outcome)))
        typer.echo(f"files     {comparison.folder}")
    if any(row["failed"] for row in outcome["rows"]):
        raise typer.Exit(1)
