"""The commands `harp submit apb` and `harp submit robustbench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, Typer

from harp.cli import options
from harp.cli.output import echo, print_json
from harp.errors import PROBLEM

if TYPE_CHECKING:
    from harp.reports.leaderboards import Submission

submit = Typer(
    help="Write the files that a public leaderboard asks for, and check them.",
)

_Out = Annotated[Path, Option(help="A new folder for the files.")]
_Link = Annotated[str | None, Option(help="Address of the paper; default: of the method's.")]


@submit.command()
def apb(
    runs: Annotated[list[Path], Argument(help="Runs of one method: 90 %, 95 % and 99 % of an architecture.")],
    out: _Out = Path("submission-apb"),
    key: Annotated[str | None, Option(help="Name_AuthorYearWord; default: by the method's paper.")] = None,
    link: _Link = None,
    as_json: options.Json = False,
) -> None:
    """The Adversarial Pruning Benchmark: checkpoints, keys, taxonomy, numbers, the text of the issue.

    Evaluate the runs first: harp evaluate RUN --attack autoattack --epsilon 0.031 --distances --examples 10000

    Example: harp submit apb runs/hydra-90-0123456789ab runs/hydra-95-123456789abc runs/hydra-99-23456789abcd
    """
    from harp.reports.leaderboards.apb import prepare

    _show(prepare(runs, out, ap_key=key, paper=link), as_json)


@submit.command()
def robustbench(
    run: Annotated[Path, Argument(help="A finished run on CIFAR-10 or CIFAR-100.")],
    name: Annotated[str, Option(help="The model's name, like Zhao2023Holistic_R18.")],
    out: _Out = Path("submission-robustbench"),
    title: Annotated[str | None, Option(help="The paper's title; default: of the method's paper.")] = None,
    authors: Annotated[str | None, Option(help="Its authors; the same default.")] = None,
    venue: Annotated[str | None, Option(help="Where it appeared; the same default.")] = None,
    link: _Link = None,
    as_json: options.Json = False,
) -> None:
    """RobustBench: the model's entry, its definition in plain torch, its checkpoint, the text of the issue.

    Evaluate the run first: harp evaluate RUN --attack autoattack --epsilon 8/255 --examples 10000

    Example: harp submit robustbench runs/mine-0123456789ab --name Zhao2023Holistic_R18
    """
    from harp.reports.leaderboards.robustbench import prepare

    _show(prepare(run, out, name=name, title=title, authors=authors, venue=venue, link=link), as_json)


def _show(submission: "Submission", as_json: bool) -> None:
    """Print the problems and the folder; exit code 1 if the submission is not valid."""
    for problem in submission.problems:
        echo(problem, err=True)
    if as_json:
        found = {"errors": submission.errors, "warnings": submission.warnings}
        print_json({"folder": str(submission.folder), **found})
    else:
        echo(f"files     {submission.folder}")
    if submission.errors:
        raise Exit(PROBLEM)
