"""The commands `harp evaluate`, `harp report` and `harp submit`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli import evaluate_file, ranks
from harp.cli.options import (
    BEGAN,
    SIGNS,
    Accelerator,
    DataDir,
    Devices,
    Json,
    MainAddress,
    MaxMinutes,
    NodeRank,
    Nodes,
    Weights,
)
from harp.system.distributed.environment import Machines

_FULL = ("fgsm", "pgd-7", "pgd-10", "pgd-20", "pgd-40", "cw", "apgd-ce-50x5", "autoattack")


def evaluate(
    target: Annotated[
        str, typer.Argument(help="A run's folder, a model as in `harp prune`, or a deployed .harp or .onnx file.")
    ],
    data: Annotated[str | None, typer.Option(help="Data set, if the target is a model.")] = None,
    data_dir: DataDir = None,
    weights: Weights = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Like fgsm, pgd-20, pgd-20x5, cw, apgd-ce-50x5, apgd-t, fab-t, square, autoattack, aa-lite."),
    ] = None,
    epsilon: Annotated[str | None, typer.Option(help="Attack budget, like 8/255; default: the run's.")] = None,
    norm: Annotated[str | None, typer.Option(help="linf or l2; default: the run's.")] = None,
    examples: Annotated[int | None, typer.Option(help="Test images, drawn by the seed; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack and the draw.")] = 0,
    batch: Annotated[int, typer.Option(help="Images asked about at a time.")] = 256,
    curve: Annotated[bool, typer.Option("--curve", help="Accuracy over epsilon, too.")] = False,
    distances: Annotated[bool, typer.Option("--distances", help="Distances to the nearest adversarials, too.")] = False,
    corruptions: Annotated[
        Path | None, typer.Option(help="Common corruptions, too: the folder of CIFAR-10-C, CIFAR-100-C or ImageNet-C.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="AutoAttack, curve and distances.")] = False,
    checks: Annotated[bool, typer.Option(help="Look for signs of false robustness.")] = True,
    store: Annotated[bool, typer.Option("--store", help="Keep all adversarial images.")] = False,
    twin: Annotated[
        str | None,
        typer.Option(help="Of a file: the network that gradients are taken from; a run, a checkpoint or a model."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for what is found; default: the run's, FILE.evaluation, evaluations/MODEL."),
    ] = None,
    devices: Devices = 1,
    accelerator: Accelerator = "auto",
    nodes: Nodes = 1,
    node_rank: NodeRank = 0,
    main_address: MainAddress = None,
    max_minutes: MaxMinutes = None,
    as_json: Json = False,
) -> None:
    """Measure natural and robust accuracy on the test set, with 95 % intervals, and check that it can be believed.

    Every number is kept in a file and never measured twice. Interrupted? The same command goes on where it stopped.

    A deployed file is attacked as it is: what gradients find on its twin in torch is replayed on it, and Square, which
    needs answers only, asks it directly.
    """
    from harp.attacks import Ball
    from harp.deploy import exported_eval
    from harp.errors import RecipeError
    from harp.evaluation.corruptions import find
    from harp.evaluation.results import Audit
    from harp.experiments import build, presets
    from harp.reports import card, tables
    from harp.system.distributed import fabric, peers
    from harp.system.interrupt import Stop

    if exported_eval.is_artefact(target):
        wishes = evaluate_file.Wishes(
            attack or (_FULL if full else ("pgd-20",)), epsilon, norm, curve or full, corruptions, checks
        )
        if distances:
            raise RecipeError("--distances needs the gradients of the network itself: evaluate the run for that")
        if devices * nodes > 1:
            raise RecipeError(f"--devices {devices}, --nodes {nodes}: a deployed file is measured by one process")
        setting = evaluate_file.Setting(examples, seed, batch, store, max_minutes)
        evaluate_file.evaluate(Path(target), data, data_dir, twin, weights, wishes, setting, out, as_json=as_json)
        return
    if twin is not None:
        raise RecipeError(f"--twin {twin}: {target} has its own gradients; a twin is for a .harp or .onnx file")
    machines = Machines(devices, accelerator, nodes, node_rank, main_address)
    device = fabric.device_for_evaluation(machines)
    processes = peers.of_this_run()
    display = ranks.display(processes.rank == 0)
    wanted_epsilon = None if epsilon is None else presets.read_number("epsilon", epsilon)
    subject = build.load(target, data, data_dir, None if weights is None else str(weights))
    for network in (subject.model, subject.dense):
        if network is not None:
            network.to(device)
    own_ball = subject.threat
    ball = Ball(own_ball.epsilon if wanted_epsilon is None else wanted_epsilon, norm or own_ball.norm)
    names = list(attack) if attack else list(_FULL) if full else ["pgd-20"]
    attacks = [build.attack_of(name, ball) for name in names]
    corrupted = None if corruptions is None else find(corruptions, subject.data)
    stop = Stop(max_minutes, BEGAN)
    folder = out or _folder(target)
    audit = Audit(
        subject,
        folder,
        examples=examples,
        seed=seed,
        batch=batch,
        store=store,
        display=display,
        stop=stop,
        peers=processes,
    )
    if weights is None and not Path(target).is_dir():
        display.note("no --weights: the network is measured as its code makes it")
    output: dict[str, Any] = {}
    with stop.on_signals():
        results = [audit.natural(), *(audit.under(*named_attack) for named_attack in attacks)]
        output["results"] = [*results, *([audit.worst(results)] if len(results) > 2 else [])]
        if curve or full:
            output["curve"] = audit.curve(ball)
        if distances or full:
            output["distances"] = audit.distances(ball.norm)
        if corrupted is not None:
            output["corruptions"] = audit.corruptions(corrupted)
        if subject.dense is not None:
            output["flips"] = audit.flips(subject.dense)
        if checks:
            output["checks"] = audit.checks(ball, [*results, *([output["curve"]] if "curve" in output else [])])
    if processes.rank > 0:
        return
    if folder == Path(target) / "evaluation":
        card.write(Path(target))
    if as_json:
        typer.echo(json.dumps(output, indent=2))
        return
    columns = ("test", "accuracy", "95 % interval", "n", "epsilon")
    rows = [[row[0], *row[2:]] for row in tables.result_rows([], output["results"])]
    display.table(f"{target} on {subject.data.name} ({results[0]['measure']})", columns, rows)
    for line in tables.remarks(output):
        typer.echo(line)
    if "checks" in output:
        marked = [[f"{SIGNS[f['verdict']]} {f['check']}", f["text"]] for f in output["checks"]["findings"]]
        display.table("\nsigns of false robustness", ("check", ""), marked)
    typer.echo(f"files     {folder}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option(help="The HTML file; its JSON and Markdown go beside it.")] = Path("report.html"),
) -> None:
    """Make one HTML page of runs: accuracy, robustness, size, the learned strategy, training, checks. Opens offline."""
    from harp.reports.html import build

    for path in build(runs, out):
        typer.echo(path)


submit = typer.Typer(
    no_args_is_help=True,
    help="Write the files that a public leaderboard asks for, and check them.",
)

_Submission = Annotated[Path, typer.Option(help="A new folder for the files.")]
_Link = Annotated[str | None, typer.Option(help="Address of the paper; default: of the method's.")]


@submit.command()
def apb(
    runs: Annotated[list[Path], typer.Argument(help="Runs of one method: 90 %, 95 % and 99 % of an architecture.")],
    out: _Submission = Path("submission-apb"),
    key: Annotated[str | None, typer.Option(help="Name_AuthorYearWord; default: by the method's paper.")] = None,
    paper: _Link = None,
) -> None:
    """The Adversarial Pruning Benchmark: checkpoints, keys, taxonomy, numbers, the text of the issue.

    Evaluate the runs first: harp evaluate RUN --attack autoattack --epsilon 0.031 --distances --examples 10000
    """
    from harp.reports.leaderboards.apb import prepare

    _say(prepare(runs, out, ap_key=key, paper=paper))


@submit.command()
def robustbench(
    run: Annotated[Path, typer.Argument(help="A finished run on CIFAR-10 or CIFAR-100.")],
    name: Annotated[str, typer.Option(help="The model's name, like Zhao2023Holistic_R18.")],
    out: _Submission = Path("submission-robustbench"),
    title: Annotated[str | None, typer.Option(help="The paper's title; default: of the method's paper.")] = None,
    authors: Annotated[str | None, typer.Option(help="Its authors; the same default.")] = None,
    venue: Annotated[str | None, typer.Option(help="Where it appeared; the same default.")] = None,
    link: _Link = None,
) -> None:
    """RobustBench: the model's entry, its definition in plain torch, its checkpoint, the text of the issue.

    Evaluate the run first: harp evaluate RUN --attack autoattack --epsilon 8/255 --examples 10000
    """
    from harp.reports.leaderboards.robustbench import prepare

    _say(prepare(run, out, name=name, title=title, authors=authors, venue=venue, link=link))


def _say(submission: Any) -> None:
    """Print the problems and the folder; exit code 1 if the submission is not valid."""
    for problem in submission.problems:
        typer.echo(problem, err=True)
    typer.echo(f"files     {submission.folder}")
    if submission.errors:
        raise typer.Exit(1)


def _folder(target: str) -> Path:
    """The folder for the results: inside the run, or named after the model."""
    if Path(target).is_dir():
        return Path(target) / "evaluation"
    words = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in target.rpartition("/")[2])
    return Path("evaluations") / words.strip("-.")
