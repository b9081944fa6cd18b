"""The command `harp compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from harp.cli import options
from harp.cli.output import echo, print_json
from harp.errors import PROBLEM

if TYPE_CHECKING:
    from harp.experiments.compare import Comparison
    from harp.experiments.slurm import Status
    from harp.system.progress import Quiet


def compare(
    study: Annotated[
        str, Argument(help="A study or a recipe: a name (`harp list studies` or `recipes`) or a YAML file.")
    ],
    methods: Annotated[str | None, Option(help="Like harp,hydra+lamp,harp:reach=0,dense-small.")] = None,
    keep: Annotated[str | None, Option(help="Shares of the budget to keep, like 10%,1%,0.5%.")] = None,
    seeds: Annotated[str | None, Option(help="Seeds, like 0,1,2.")] = None,
    objective: options.Objective = None,
    channels: options.Channels = False,
    protocol: Annotated[
        str | None,
        Option(help="Epochs: equal (the default: the same for all), paper (as published) or given (as in the recipe)."),
    ] = None,
    rank_by: Annotated[str | None, Option(help="The attack that ranks the methods, like pgd-10.")] = None,
    jobs: Annotated[int, Option(min=1, help="Runs at a time; they share the machine's cores.")] = 1,
    launcher: options.Launcher = "local",
    sbatch: options.Sbatch = "",
    dry_run: Annotated[bool, Option("--dry-run", help="SLURM: write the job files, submit nothing.")] = False,
    wait: Annotated[bool, Option("--wait", help="SLURM: wait for the jobs, then write the tables.")] = False,
    devices: options.Devices = 1,
    workers: options.Workers = None,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    changes: options.Set = [],  # noqa: B006 (typer copies it)
    max_minutes: options.MaxMinutes = None,
    as_json: options.Json = False,
) -> None:
    """Compare methods under one recipe: every method, budget and seed, then a table and a plot with intervals.

    Example: harp compare fashion --methods harp,hydra,magnitude,dense-small --keep 5%,1% --seeds 0,1,2 --jobs 2

    NAME+STRATEGY spreads the budget by a strategy; NAME:option=value sets an option. `dense-small` is a dense network
    with as many weights as the others keep. All train for the same epochs: by the protocol `equal` the epochs that a
    one-shot method does not need for pruning go to its fine-tuning. With `--protocol paper` they train as published.
    Interrupted? The same command goes on.

    On a cluster `--launcher slurm` submits a job a run. The same command again shows how they are, submits what failed,
    and writes the tables when all are finished.
    """
    from harp.experiments import slurm
    from harp.experiments.compare import Comparison
    from harp.experiments.compose import Choice
    from harp.experiments.study import load
    from harp.system.interrupt import Stop
    from harp.system.progress import Terminal

    options.check_launcher(launcher, sbatch or dry_run or wait, max_minutes)
    stop = Stop(max_minutes, options.BEGAN)
    display = Terminal()
    choice = Choice(objective=objective, channels=channels)
    planned = load(
        study,
        methods=methods,
        keep=keep,
        seeds=seeds,
        rank_by=rank_by,
        protocol=protocol,
        changes=changes,
        choice=choice,
    )
    comparison = Comparison(
        planned, out, data_dir=data_dir, display=display, workers=workers, elsewhere=launcher != "local"
    )
    if launcher == "local":
        _show(comparison, comparison.execute(jobs, devices=devices, stop=stop), display, as_json)
        return
    queue = slurm.Slurm(comparison.folder, comparison.jobs(devices), sbatch, devices)
    if not dry_run:
        slurm.require()
    comparison.write_recipes()
    if dry_run:
        written = queue.write()
        if as_json:
            print_json({"folder": str(comparison.folder), "jobs": [], "files": [str(path) for path in written]})
        else:
            echo(f"{len(written)} job files in {comparison.folder / 'jobs'}; nothing was submitted")
        return
    jobs_of_runs = queue.submit()
    failed: dict[str, str] = {}
    if wait and _unfinished(jobs_of_runs):
        failed = queue.wait(display)
    elif _unfinished(jobs_of_runs):
        _show_queue(comparison, jobs_of_runs, display, as_json)
        return
    _show(comparison, comparison.collect(failed), display, as_json)


def _unfinished(jobs: list["Status"]) -> int:
    """The number of unfinished jobs."""
    from harp.experiments.slurm import State

    return sum(job.state is not State.FINISHED for job in jobs)


def _show_queue(comparison: "Comparison", jobs: list["Status"], display: "Quiet", as_json: bool) -> None:
    """Show the state of the jobs, and what to do next."""
    if as_json:
        entries = [{"name": job.name, "state": job.state, "job": job.id, "note": job.note} for job in jobs]
        print_json({"folder": str(comparison.folder), "jobs": entries, "files": []})
        return
    rows = [[job.name, job.id or "–", job.state, job.note] for job in jobs]
    display.table("\njobs", ("run", "job", "state", ""), rows)
    submitted = sum(job.note == "submitted" for job in jobs)
    echo(f"\n{submitted} submitted, {len(jobs) - _unfinished(jobs)} of {len(jobs)} runs finished")
    echo(f"logs      {comparison.folder / 'logs'}")
    echo("The same command shows how they are, submits what failed, and writes the tables when all are finished.")


def _show(comparison: "Comparison", outcome: dict[str, Any], display: "Quiet", as_json: bool) -> None:
    """Draw the plot and print the tables of all runs."""
    from harp.errors import MissingExtra
    from harp.experiments import table
    from harp.reports import plots
    from harp.system.files import read_json

    try:
        plots.draw_study(comparison.folder, outcome)
    except MissingExtra as error:
        echo(f"picture   none: {error}", err=True)
    if as_json:
        print_json({"folder": str(comparison.folder), **read_json(comparison.folder / "results.json")})
    else:
        for title, rows in table.blocks(outcome):
            display.table(f"\n{title}", table.columns(outcome["attack"], outcome["unit"]), rows)
        echo("\n" + "\n".join(table.notes(outcome)))
        echo(f"files     {comparison.folder}")
    if any(row["failed"] for row in outcome["rows"]):
        raise Exit(PROBLEM)
