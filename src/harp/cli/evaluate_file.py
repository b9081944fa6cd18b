"""`harp evaluate` of a deployed file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from harp.cli.options import BEGAN, SIGNS


@dataclass(frozen=True)
class Wishes:
    """What is to be measured."""

    attacks: Sequence[str]
    epsilon: str | None
    norm: str | None
    curve: bool
    corruptions: bool
    checks: bool


@dataclass(frozen=True)
class Setting:
    """On which images, and how."""

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
    """Measure the file and its twin, and say both."""
    from harp import assess, deployed, presets
    from harp.attacks import Ball
    from harp.deployed.trial import is_black_box
    from harp.display import Terminal
    from harp.keeper import Stop

    display = Terminal()
    wish = None if wishes.epsilon is None else presets.read_number("epsilon", wishes.epsilon)
    artefact = deployed.opened(path)
    origin = deployed.origin_of(artefact)
    subjects = deployed.prepared(artefact, origin, data_name=data, data_dir=data_dir, twin=twin, weights=weights)
    if origin.unlisted:
        display.note(f"the manifest beside {path.name} does not list it: it is taken for another network's")
    if subjects.remark:
        display.note(subjects.remark)
    ball = Ball(subjects.threat.epsilon if wish is None else wish, wishes.norm or subjects.threat.norm)
    attacks = [assess.attack_of(name, ball) for name in wishes.attacks]
    if not any(is_black_box(attack) for _, attack in attacks):
        attacks.append(assess.attack_of("square", ball))
    if subjects.twin is None:
        left = [name for name, attack in attacks if not is_black_box(attack)]
        display.note(f"no twin in torch (--twin): only black-box attacks run, not {', '.join(left) or 'others'}")
        attacks = [(name, attack) for name, attack in attacks if is_black_box(attack)]
    stop = Stop(setting.max_minutes, BEGAN)
    folder = out or path.with_name(f"{path.name}.evaluation")
    trial = deployed.Trial(
        subjects,
        folder,
        examples=setting.examples,
        seed=setting.seed,
        batch=setting.batch,
        store=setting.store,
        display=display,
        stop=stop,
    )
    more: dict[str, Any] = {}
    with stop.on_signals():
        tests = [trial.natural(), *(trial.under(name, made) for name, made in attacks)]
        if wishes.curve and subjects.twin is not None:
            more["curve"] = trial.curve(ball)
        if wishes.corruptions:
            more["corruptions"] = trial.direct.corruptions()
        findings = trial.checks(ball, tests) if wishes.checks else []
        found = trial.summary([*tests, trial.worst(tests)], findings, ball, **more)
    for finding in findings:
        if finding.verdict == "bad":
            display.note(f"warning: {finding.check}: {finding.text}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    _show(display, found)
    typer.echo(f"files     {folder}")


def _show(display: Any, found: dict[str, Any]) -> None:
    artefact = found["artefact"]
    columns = ("test", "in torch", "as deployed", "95 % interval", "n", "epsilon", "")
    title = f"{artefact['file']} on {found['data']} ({found['measure']})"
    display.table(title, columns, [_row(test) for test in found["tests"]])
    if "curve" in found:
        shown = ", ".join(f"{p['epsilon']:.4g}: {p['deployed']['value']:.1%}" for p in found["curve"])
        typer.echo(f"curve     {shown}")
    if "corruptions" in found:
        typer.echo(f"corrupted {found['corruptions']['mean']:.1%} on average")
    for each in found["agreement"]:
        off = f"logits differ by at most {each['difference']:.2g} ({each['relative']:.1g} of the largest)"
        typer.echo(f"agreement {each['agree']:,} of {each['n']:,} predictions with {each['with']}, {off}")
    runtime = ", ".join(f"{key} {value}" for key, value in artefact["runtime"].items())
    typer.echo(f"sha256    {artefact['sha256']} ({artefact['bytes']:,} bytes; {runtime})")
    if found["checks"]:
        marked = [[f"{SIGNS[f['verdict']]} {f['check']}", f["text"]] for f in found["checks"]]
        display.table("\nis it what it seems?", ("check", ""), marked)


_HOW = {
    "images": "",
    "replayed": "found on the twin, replayed on the file",
    "queries": "asked of the file itself",
    "union": "an image counts if nothing fools it",
}


def _row(test: dict[str, Any]) -> list[str]:
    from harp import summary

    inside, outside = test["torch"], test["deployed"]
    name, _, value, interval, n, epsilon = summary.result_rows([], [outside])[0]
    return [name, "–" if inside is None else f"{inside['value']:.1%}", value, interval, n, epsilon, _HOW[test["how"]]]
