"""The command `harp evaluate`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from harp.cli import evaluate_file, options, processes
from harp.cli.output import echo, print_json, show_findings
from harp.errors import PROBLEM
from harp.system.distributed.environment import Machines

if TYPE_CHECKING:
    from harp.evaluation.accuracy import Subject
    from harp.system.progress import Quiet

_FULL = ["fgsm", "pgd-7", "pgd-10", "pgd-20", "pgd-40", "cw", "apgd-ce-50x5", "autoattack"]


def evaluate(
    target: Annotated[str, Argument(help="A run's folder, a model as in `harp prune`, or a .harp or .onnx file.")],
    data: options.ModelData = None,
    data_dir: options.DataDir = None,
    weights: options.Weights = None,
    size: options.Size = None,
    normalize: options.Normalize = None,
    attack: Annotated[
        list[str] | None,
        Option(help="Like fgsm, pgd-20, pgd-20x5, cw, apgd-ce-50x5, apgd-t, fab-t, square, autoattack, aa-lite."),
    ] = None,
    epsilon: Annotated[str | None, Option(help="Attack budget, like 8/255; default: the run's.")] = None,
    norm: Annotated[str | None, Option(help="linf or l2; default: the run's.")] = None,
    examples: Annotated[int | None, Option(min=1, help="Test images, drawn by the seed; default: all.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the attack and the draw.")] = 0,
    batch: Annotated[int, Option(min=1, help="Images asked about at a time.")] = 256,
    curve: Annotated[bool, Option("--curve", help="Accuracy over epsilon, too.")] = False,
    distances: Annotated[bool, Option("--distances", help="Distances to the nearest adversarials, too.")] = False,
    corruptions: Annotated[
        Path | None, Option(help="Common corruptions, too: the folder of CIFAR-10-C, CIFAR-100-C or ImageNet-C.")
    ] = None,
    full: Annotated[bool, Option("--full", help="AutoAttack, curve and distances.")] = False,
    checks: Annotated[bool, Option(help="Look for signs of false robustness.")] = True,
    store: Annotated[bool, Option("--store", help="Keep all adversarial images.")] = False,
    twin: Annotated[
        str | None, Option(help="Of a file: where gradients come from; a run, a checkpoint or a model.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder; default: the run's, FILE.evaluation or evaluations/MODEL.")
    ] = None,
    devices: options.Devices = 1,
    accelerator: options.Accelerator = "auto",
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    main_address: options.MainAddress = None,
    max_minutes: options.MaxMinutes = None,
    as_json: options.Json = False,
) -> None:
    """Measure natural and robust accuracy on the test set, with 95 % intervals, and check that it can be believed.

    Example: harp evaluate runs/mine-0123456789ab --attack autoattack --examples 1000

    Every number is kept in a file and never measured twice. Interrupted? The same command goes on where it stopped.

    A deployed file is attacked as it is: what gradients find on its twin in torch is replayed on it, and Square, which
    needs answers only, asks it directly.
    """
    from harp.attacks import Ball, length
    from harp.deploy import exported_eval
    from harp.errors import RecipeError
    from harp.evaluation.corruptions import find
    from harp.evaluation.results import Audit
    from harp.experiments import build
    from harp.models import has_weights
    from harp.reports import card
    from harp.system.distributed import fabric, peers
    from harp.system.interrupt import Stop

    names = attack or (_FULL if full else ["pgd-20"])
    radius = None if epsilon is None else length("epsilon", epsilon, norm or "l2")  # the ball knows the norm
    stop = Stop(max_minutes, options.BEGAN)
    audit_of = partial(Audit, examples=examples, seed=seed, batch=batch, store=store, stop=stop)

    def ball_in(threat: Ball) -> Ball:
        return Ball(threat.epsilon if radius is None else radius, norm or threat.norm)

    if exported_eval.is_artefact(target):
        if distances:
            raise RecipeError("--distances needs the gradients of the network itself: evaluate the run for that")
        if devices * nodes > 1:
            raise RecipeError(f"--devices {devices}, --nodes {nodes}: a deployed file is measured by one process")
        display = processes.display(first=True)
        setup = exported_eval.prepared(Path(target), data_name=data, data_dir=data_dir, twin=twin, weights=weights)
        for note in setup.notes:
            display.note(note)
        ball, folder = ball_in(setup.threat), out or Path(f"{target}.evaluation")
        attacks = evaluate_file.attacks_on(setup, names, ball, display)
        corrupted = None if corruptions is None else find(corruptions, setup.data)
        evaluation = exported_eval.FileEvaluation(setup, folder, partial(audit_of, display=display))
        with stop.on_signals():
            output = evaluation.measure(attacks, ball, curve=curve or full, corrupted=corrupted, checks=checks)
        evaluate_file.show(display, output, folder, as_json=as_json)
        return
    if twin is not None:
        raise RecipeError(f"--twin {twin}: {target} has its own gradients; a twin is for a .harp or .onnx file")
    device = fabric.device_for_evaluation(Machines(devices, accelerator, nodes, node_rank, main_address))
    processes_of_run = peers.of_this_run()
    display = processes.display(processes_of_run.rank == 0)
    given = None if weights is None else str(weights)
    subject = build.load(target, data, data_dir, given, size=size, normalize=normalize)
    for network in (subject.model, subject.dense):
        if network is not None:
            network.to(device)
    ball = ball_in(subject.threat)
    attacks = [build.attack_of(name, ball) for name in names]
    corrupted = None if corruptions is None else find(corruptions, subject.data)
    folder = out or _folder(target)
    audit = audit_of(subject, folder, display=display, peers=processes_of_run)
    if weights is None and not Path(target).is_dir() and not has_weights(target):
        display.note("no --weights: the network is measured as its code makes it")
    with stop.on_signals():
        results = [audit.natural(), *(audit.under(*named_attack) for named_attack in attacks)]
        output = {"results": [*results, *([audit.worst(results)] if len(results) > 2 else [])]}
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
    if processes_of_run.rank > 0:
        return
    if folder == Path(target) / "evaluation":
        card.write(Path(target))
    bad = [finding for finding in output.get("checks", {}).get("findings", ()) if finding["verdict"] == "bad"]
    if as_json:
        print_json(output)
        for finding in bad:
            display.note(f"warning: {finding['check']}: {finding['text']}")
    else:
        _show(display, subject, target, output)
        echo(f"files     {folder}")
    if bad:
        raise Exit(PROBLEM)


def _show(display: "Quiet", subject: "Subject", target: str, output: dict[str, Any]) -> None:
    """Print the numbers, and whether they can be believed."""
    from harp.reports import tables

    results = output["results"]
    columns = ("test", "accuracy", "95 % interval", "n", "epsilon")
    rows = [[row[0], *row[2:]] for row in tables.result_rows([], results)]
    display.table(f"{target} on {subject.data.name} ({results[0]['measure']})", columns, rows)
    for line in tables.remarks(output):
        echo(line)
    if "checks" in output:
        show_findings(display, "signs of false robustness", output["checks"]["findings"])


def _folder(target: str) -> Path:
    """The folder for the results: inside the run, or named after the model."""
    if Path(target).is_dir():
        return Path(target) / "evaluation"
    words = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in target.rpartition("/")[2])
    return Path("evaluations") / words.strip("-.")
