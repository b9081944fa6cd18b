"""The command `harp reproduce`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from harp.cli import options
from harp.cli.output import echo, print_json
from harp.errors import PROBLEM

if TYPE_CHECKING:
    from harp.experiments.compare import Comparison
    from harp.experiments.reproduction.claim import Claim
    from harp.experiments.reproduction.evidence import Evidence
    from harp.system.interrupt import Stop
    from harp.system.progress import Quiet

_KEYS = ("claim", "place", "title", "verdict", "small_verdict", "cost")


def reproduce(
    claim: Annotated[str | None, Argument(help="A claim of the list that `harp reproduce` prints.")] = None,
    small: Annotated[bool, Option("--small", help="The small variant, which runs on a small machine.")] = False,
    seeds: Annotated[str | None, Option(help="Other seeds than the claim's, like 1,2.")] = None,
    cost: Annotated[bool, Option("--cost", help="Say how many runs and epochs it takes, and run nothing.")] = False,
    check: Annotated[
        Path | None, Option(help="Judge these runs (a folder) or this evidence (a file), and run nothing.")
    ] = None,
    bundle: Annotated[Path | None, Option(help="Write what was measured to this file, to hand it in.")] = None,
    jobs: Annotated[int, Option(min=1, help="Runs at a time; they share the machine's cores.")] = 1,
    launcher: options.Launcher = "local",
    sbatch: options.Sbatch = "",
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    max_minutes: options.MaxMinutes = None,
    as_json: options.Json = False,
) -> None:
    """Reproduce a table or figure of the HARP paper: run what is missing, then judge it against what was published.

    Example: harp reproduce ablation --small --jobs 2

    Without a claim it lists them, with our verdicts and what they cost. `--small` runs a variant for a small machine,
    of which only the order of methods is judged; without it the paper's own experiment runs, which takes GPUs.
    `--check` judges runs that were made elsewhere. With `--launcher slurm` the same command again judges what is done.

    Verdicts are by 95 % intervals, with tolerances that were fixed before: reproduced, differs, open, not run. Orders
    of methods are judged by paired intervals over seeds. Interrupted? The same command goes on.
    """
    from harp.errors import RecipeError
    from harp.experiments.compare import Comparison
    from harp.experiments.reproduction import claim as claims
    from harp.experiments.reproduction.evidence import collect
    from harp.system.interrupt import Stop
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
    options.check_launcher(launcher, sbatch, max_minutes)
    failed = 0
    if check is not None and check.is_file():
        evidence = _from_file(chosen, check)
    else:
        if check is not None and not check.is_dir():
            raise RecipeError(f"--check {check}: give a folder of runs or a file that --bundle wrote")
        variant, comparisons = chosen.variant(small=small), {}
        for name, experiment in variant.experiments.items():
            planned = experiment.study(f"{chosen.id}-{name}", _numbers(seeds))
            comparisons[name] = Comparison(
                planned, check or out, data_dir=data_dir, display=display, elsewhere=launcher == "slurm"
            )
        stop = Stop(max_minutes, options.BEGAN)
        for comparison in comparisons.values() if check is None else ():
            if launcher == "slurm":
                _submit(comparison, sbatch)
            else:
                failed += _execute(comparison, jobs, stop)
        evidence = collect(chosen, small=small, comparisons=comparisons)
    if bundle is not None:
        evidence.write(bundle)
        echo(f"bundle    {bundle}", err=as_json)
    _show(chosen, evidence, out, display, as_json)
    if failed:
        raise Exit(PROBLEM)


def _list(display: "Quiet", as_json: bool) -> None:
    from harp.experiments.reproduction import claim as claims
    from harp.experiments.reproduction import evidence, judge

    rows = []
    for each in claims.shipped().values():
        verdicts = [judge.overall(each, evidence.shipped(each.id, small=small), small=small) for small in (False, True)]
        runs, epochs = each.full.length()
        cost = f"{runs:,} runs, {epochs:,} epochs" if runs else "none"
        rows.append([each.id, each.place, each.title, str(verdicts[0]), str(verdicts[1]), cost])
    columns = ("claim", "place", "what", "verdict", "small variant", "full cost")
    if as_json:
        print_json({"claims": [dict(zip(_KEYS, row, strict=True)) for row in rows]})
        return
    narrow = [[row[0], row[1].replace(" (appendix)", ""), *row[3:]] for row in rows]
    display.table(
        "claims of the HARP paper, judged by the evidence of this version", (*columns[:2], *columns[3:]), narrow
    )
    echo("\nharp reproduce CLAIM [--small] runs what is missing and prints the published numbers beside yours.")


def _cost(chosen: "Claim", small: bool, display: "Quiet", as_json: bool) -> None:
    variant = chosen.variant(small=small)
    runs, epochs = variant.length()
    if as_json:
        print_json({"claim": chosen.id, "small": small, "runs": runs, "epochs": epochs})
        return
    rows = [
        [name, e.recipe if isinstance(e.recipe, str) else "its own", len(e.methods), ", ".join(e.keep), len(e.seeds)]
        for name, e in variant.experiments.items()
    ]
    display.table(chosen.title, ("experiment", "recipe", "methods", "keep", "seeds"), [list(map(str, r)) for r in rows])
    echo(f"\n{runs:,} runs, {epochs:,} epochs; `harp estimate RECIPE` measures what an epoch takes on your machine.")


def _numbers(seeds: str | None) -> tuple[int, ...] | None:
    from harp.errors import RecipeError

    try:
        return None if seeds is None else tuple(int(text) for text in seeds.split(","))
    except ValueError as error:
        raise RecipeError(f"--seeds {seeds}: give whole numbers like 1,2") from error


def _from_file(chosen: "Claim", path: Path) -> "Evidence":
    """The evidence in a file, if it can be evidence of the claim."""
    from harp.errors import CheckpointError
    from harp.experiments.reproduction import evidence

    found = evidence.read(path)
    problems = evidence.problems(found, chosen)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{path}: {problems[0]}{more}")
    return found


def _execute(comparison: "Comparison", jobs: int, stop: "Stop") -> int:
    """Run what is missing; the number of runs that failed."""
    failed = [run for run in comparison.execute(jobs, stop=stop)["runs"] if run["failed"] is not None]
    for run in failed:
        echo(f"failed    {run['name']}: {run['failed']}", err=True)
    return len(failed)


def _submit(comparison: "Comparison", sbatch: str) -> None:
    """Submit what is missing, and say how the jobs are."""
    from harp.experiments import slurm

    slurm.require()
    comparison.write_recipes()
    statuses = slurm.Slurm(comparison.folder, comparison.jobs(), sbatch).submit()
    finished = sum(status.state is slurm.State.FINISHED for status in statuses)
    logs = comparison.folder / "logs"
    echo(f"jobs      {comparison.study.name}: {finished} of {len(statuses)} finished; logs in {logs}", err=True)


def _show(chosen: "Claim", found: "Evidence", out: Path, display: "Quiet", as_json: bool) -> None:
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
        print_json({**told, "lines": [dict(zip(keys, cell, strict=True)) for cell in cells]})
        return
    for name, rows in claims.tables(chosen, found, small=small).items():
        display.table(f"\n{chosen.place}, {name}: published | ours", tuple(rows[0]), rows[1:])
    table = [[line.what, line.published, line.ours, line.verdict.state.value] for line in lines]
    display.table(f"\n{chosen.title}", ("what", "published", "ours", "verdict"), table)
    echo(f"\nverdict   {verdict}")
    for text in chosen.departures:
        echo(f"departure {text}")
    echo(f"files     {folder}")
    missing = chosen.variant(small=small).length()[0] - len(found.records)
    if missing > 0:
        echo(f"missing   {missing} of the claim's runs; the same command does what is not done")
