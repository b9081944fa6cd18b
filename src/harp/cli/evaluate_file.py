"""`harp evaluate` for a deployed file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from harp.cli.options import BEGAN, SIGNS


@dataclass(frozen=True)
class Wishes:
    """The measurements that the user asks for."""

    attacks: Sequence[str]
    epsilon: str | None
    norm: str | None
    curve: bool
    corruptions: Path | None
    checks: bool


@dataclass(frozen=True)
class Setting:
    """The images and the settings of a measurement."""

    examples: int | None
    seed: int
    batch: int
    store: bool
    max_minutes: float | None = None


def evaluate(
    path: Path,
    data: str | None,
    data_dir: Path | None,
    twin: str | None,
    weights: Path | None,
    wishes: Wishes,
    setting: Setting,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Measure the file and its twin, and print both."""
    from harp.attacks import Ball
    from harp.deploy import exported_eval
    from harp.deploy.exported_eval.evaluate import is_black_box
    from harp.evaluation.corruptions import find
    from harp.experiments import build, presets
    from harp.system.interrupt import Stop
    from harp.system.progress import Terminal

    display = Terminal()
    wanted_epsilon = None if wishes.epsilon is None else presets.read_number("epsilon", wishes.epsilon)
    artefact = exported_eval.opened(path)
    origin = exported_eval.origin_of(artefact)
    subjects = exported_eval.prepared(artefact, origin, data_name=data, data_dir=data_dir, twin=twin, weights=weights)
    if origin.unlisted:
        display.note(f"the manifest beside {path.name} does not list it: it is taken for another network's")
    if subjects.remark:
        display.note(subjects.remark)
    ball = Ball(
        subjects.threat.epsilon if wanted_epsilon is None else wanted_epsilon, wishes.norm or subjects.threat.norm
    )
    attacks = [build.attack_of(name, ball) for name in wishes.attacks]
    if not any(is_black_box(attack) for _, attack in attacks):
        attacks.append(build.attack_of("square", ball))
    if subjects.twin is None:
        skipped = [name for name, attack in attacks if not is_black_box(attack)]
        display.note(f"no twin in torch (--twin): only black-box attacks run, not {', '.join(skipped) or 'others'}")
        attacks = [(name, attack) for name, attack in attacks if is_black_box(attack)]
    corrupted = None if wishes.corruptions is None else find(wishes.corruptions, subjects.data)
    stop = Stop(setting.max_minutes, BEGAN)
    folder = out or path.with_name(f"{path.name}.evaluation")
    trial = exported_eval.Trial(
        subjects,
        folder,
        examples=setting.examples,
        seed=setting.seed,
        batch=setting.batch,
        store=setting.store,
        display=display,
        stop=stop,
    )
    extra: dict[str, Any] = {}
    with stop.on_signals():
        tests = [trial.natural(), *(trial.under(name, attack) for name, attack in attacks)]
        if wishes.curve and subjects.twin is not None:
            extra["curve"] = trial.curve(ball)
        if corrupted is not None:
            extra["corruptions"] = trial.direct.corruptions(corrupted)
        findings = trial.checks(ball, tests) if wishes.checks else []
        output = trial.summary([*tests, trial.worst(tests)], findings, ball, **extra)
    for finding in findings:
        if finding.verdict == "bad":
            display.note(f"warning: {finding.check}: {finding.text}")
    if as_json:
        typer.echo(json.dumps(output, indent=2))
        return
    _show(display, output)
    typer.echo(f"files     {folder}")


def _show(display: Any, output: dict[str, Any]) -> None:
    artefact = output["artefact"]
    columns = ("test", "in torch", "as deployed", "95 % interval", "n", "epsilon", "")
    title = f"{artefact['file']} on {output['data']} ({output['measure']})"
    display.table(title, columns, [_row(test) for test in output["tests"]])
    if "curve" in output:
        shown = ", ".join(f"{p['epsilon']:.4g}: {p['deployed']['value']:.1%}" for p in output["curve"])
        typer.echo(f"curve     {shown}")
    if "corruptions" in output:
        typer.echo(f"corrupted {output['corruptions']['mean']:.1%} on average")
    for agreement in output["agreement"]:
        error = f"logits differ by at most {agreement['difference']:.2g} ({agreement['relative']:.1g} of the largest)"
        typer.echo(
            f"agreement {agreement['agree']:,} of {agreement['n']:,} predictions with {agreement['with']}, {error}"
        )
    runtime = ", ".join(f"{key} {value}" for key, value in artefact["runtime"].items())
    typer.echo(f"sha256    {artefact['sha256']} ({artefact['bytes']:,} bytes; {runtime})")
    if output["checks"]:
        marked = [[f"{SIGNS[f['verdict']]} {f['check']}", f["text"]] for f in output["checks"]]
        display.table("\nis it what it seems?", ("check", ""), marked)


_HOW = {
    "images": "",
    "replayed": "found on the twin, replayed on the file",
    "queries": "asked of the file itself",
    "union": "an image counts if nothing fools it",
}


def _row(test: dict[str, Any]) -> list[str]:
    from harp.reports import tables

    in_torch, deployed = test["torch"], test["deployed"]
    name, _, value, interval, n, epsilon = tables.result_rows([], [deployed])[0]
    return [
        name,
        "–" if in_torch is None else f"{in_torch['value']:.1%}",
        value,
        interval,
        n,
        epsilon,
        _HOW[test["how"]],
    ]
