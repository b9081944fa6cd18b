"""`harp evaluate` of a deployed file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from harp.cli.output import echo, print_json, show_findings
from harp.errors import PROBLEM

if TYPE_CHECKING:
    from harp.attacks import Ball
    from harp.deploy.exported_eval import Setup
    from harp.system.progress import Quiet

_HOW = {
    "images": "",
    "replayed": "found on the twin, replayed on the file",
    "queries": "asked of the file itself",
    "union": "an image counts if nothing fools it",
}


def attacks_on(setup: "Setup", names: Sequence[str], ball: "Ball", display: "Quiet") -> list[tuple[str, Any]]:
    """The attacks by name, with Square if no other attack by queries is named; without a twin only those."""
    from harp.deploy.exported_eval import is_black_box
    from harp.experiments import build

    attacks = [build.attack_of(name, ball) for name in names]
    if not any(is_black_box(attack) for _, attack in attacks):
        attacks.append(build.attack_of("square", ball))
    if setup.twin is None:
        skipped = [name for name, attack in attacks if not is_black_box(attack)]
        display.note(f"no twin in torch (--twin): only black-box attacks run, not {', '.join(skipped) or 'others'}")
        attacks = [(name, attack) for name, attack in attacks if is_black_box(attack)]
    return attacks


def show(display: "Quiet", output: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    """Print the results of the file and of its twin; exit code 1 if a check finds something bad."""
    bad = [finding for finding in output["checks"] if finding["verdict"] == "bad"]
    for finding in bad:
        display.note(f"warning: {finding['check']}: {finding['text']}")
    if as_json:
        print_json(output)
    else:
        _print(display, output, folder)
    if bad:
        raise typer.Exit(PROBLEM)


def _print(display: "Quiet", output: dict[str, Any], folder: Path) -> None:
    artefact = output["artefact"]
    columns = ("test", "in torch", "as deployed", "95 % interval", "n", "epsilon", "")
    title = f"{artefact['file']} on {output['data']} ({output['measure']})"
    display.table(title, columns, [_row(test) for test in output["tests"]])
    if "curve" in output:
        points = ", ".join(f"{p['epsilon']:.4g}: {p['deployed']['value']:.1%}" for p in output["curve"])
        echo(f"curve     {points}")
    if "corruptions" in output:
        echo(f"corrupted {output['corruptions']['mean']:.1%} on average")
    for agreement in output["agreement"]:
        equal = f"{agreement['agree']:,} of {agreement['n']:,} predictions with {agreement['with']}"
        error = f"logits differ by at most {agreement['difference']:.2g} ({agreement['relative']:.1g} of the largest)"
        echo(f"agreement {equal}, {error}")
    runtime = ", ".join(f"{key} {value}" for key, value in artefact["runtime"].items())
    echo(f"sha256    {artefact['sha256']} ({artefact['bytes']:,} bytes; {runtime})")
    if output["checks"]:
        show_findings(display, "is it what it seems?", output["checks"])
    echo(f"files     {folder}")


def _row(test: dict[str, Any]) -> list[str]:
    from harp.reports import tables

    in_torch = "–" if test["torch"] is None else f"{test['torch']['value']:.1%}"
    name, _, value, interval, n, epsilon = tables.result_rows([], [test["deployed"]])[0]
    return [name, in_torch, value, interval, n, epsilon, _HOW[test["how"]]]
