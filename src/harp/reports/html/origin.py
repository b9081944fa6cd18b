"""The report's chapter on where its numbers come from, and the warnings about them."""

from collections.abc import Sequence

import yaml

from harp.evaluation import accuracy_drop
from harp.experiments.records import Checks, Corruptions, Curve, Distances
from harp.reports.html.accuracy import attack_text, per_cent
from harp.reports.html.blocks import Block, Code, Fold, Section, Table, section
from harp.reports.html.collect import Run
from harp.reports.html.groups import NATURAL, Runs, Variant

_FEW = 1000  # images: with fewer, half an interval is more than three points
_NAMES = 3  # of networks in a warning
_ADVICE = " Try more epochs of fine-tuning, a larger keep, or another method or strategy."


def notes(runs: Runs, without_weights: Sequence[str]) -> list[str]:
    """What a reader has to know before believing the numbers, the gravest first."""
    variants = runs.variants
    lines = [*_failed_checks(runs), *_unmet_budgets(runs), *_differences(runs), *_images(runs)]
    bare = [variant.label for variant in variants if not any(run.records or run.unknown for run in variant.runs)]
    if bare:
        lines.append(f"No evaluation beyond the run's own tests was found for {_some(bare, runs)}.")
    if runs.robust is None:
        lines.append("No run was tested under attack: nothing here says how robust these networks are.")
    elif not any("autoattack" in key[0].lower() or key[0] == "aa" for key in runs.attacks):
        lines.append(f"No run was tested by an ensemble of attacks; {runs.robust[0]} alone can be too optimistic.")
    if len(runs.pruned) > 1 and all(len(variant.runs) == 1 for variant in runs.pruned):
        lines.append("One seed each: differences between networks may be differences between seeds.")
    gone = [v.label for v in variants if any(None in run.stages.values() for run in v.runs)]
    if gone:
        lines.append(f"The folders of the stages are missing for {_some(gone, runs)}: their training is not shown.")
    if without_weights:
        lines.append(f"There is no file of weights for {_some(without_weights, runs)}.")
    lines += [
        f"{run.folder.name}: evaluation/{name} is of an unknown kind." for run in runs.all for name in run.unknown
    ]
    return lines


def warnings(runs: Runs) -> list[str]:
    """The warnings of the runs themselves: networks at chance level, budgets that were not met in training.

    Of several runs, those with the same result share one line.
    """
    if len(runs.all) == 1:
        return list(runs.all[0].summary.warnings or ())
    failed: dict[str, dict[str, list[str]]] = {accuracy_drop.CHANCE: {}, accuracy_drop.LOW: {}}
    lines = []
    for variant in runs.variants:
        for run in variant.runs:
            if run.remark:
                failed[run.remark].setdefault(variant.label, []).append(str(run.seed))
            texts = [text for text in run.summary.warnings or () if not text.startswith(accuracy_drop.BEGINNINGS)]
            lines += [f"{variant.label}, seed {run.seed}: {text}" for text in texts]
    for remark, which in reversed(failed.items()):
        seeds = (f"{label}, seed{'s' if len(of) > 1 else ''} {', '.join(of)}" for label, of in which.items())
        if which:
            lines.insert(
                0,
                f"{remark[0].upper()}{remark[1:]}: {'; '.join(seeds)}.{_ADVICE if remark == accuracy_drop.LOW else ''}",
            )
    return lines


def _some(names: Sequence[str], runs: Runs) -> str:
    if len(names) == len(runs.variants) > 1:
        return "any network"
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def _failed_checks(runs: Runs) -> list[str]:
    files, robustness = [], []
    for variant in runs.variants:
        for record in (record for run in variant.runs for record in run.deployed):
            failed = dict.fromkeys(one.check for one in record.checks if one.verdict == "bad")
            if failed:
                name = f"{variant.label}, {record.artefact.file}"
                files.append(f"{name}: a check of the deployed file failed ({', '.join(failed)}); see below.")
        findings = [finding for run in variant.runs for record in run.of(Checks) for finding in record.findings]
        failed = dict.fromkeys(finding.check for finding in findings if finding.verdict == "bad")
        if failed:
            names = ", ".join(failed)
            robustness.append(f"{variant.label}: a check for false robustness failed ({names}); see below.")
        natural = variant.after(NATURAL)
        for key in runs.attacks:
            after = variant.after(key)
            if natural and after and after.value > natural.value:
                robustness.append(
                    f"{variant.label}: more accurate under {attack_text(key)} than without: the attack failed."
                )
    return [*files, *robustness]


def _unmet_budgets(runs: Runs) -> list[str]:
    late = [variant.label for variant in runs.variants if any(map(_never_ready, variant.runs))]
    text = "the rates of the last epoch were scaled to it. Train longer, or let γ grow faster."
    return [f"The budget was not met in training by {_some(late, runs)}: {text}"] if late else []


def _never_ready(run: Run) -> bool:
    """Whether the budget was not met, for runs of older versions, which do not warn of it themselves."""
    if run.summary.warnings is not None:
        return False
    files = [file for file in run.stages.values() if file and any("ready" in record for record in file.history)]
    return any(not any(record.get("ready", True) for record in file.history) for file in files)


def _differences(runs: Runs) -> list[str]:
    """Differences that make a comparison unfair."""
    if len(runs.all) == 1:
        return []
    lines = []
    if len(runs.units) > 1:
        counted = ", ".join(runs.units)
        lines.append(f"The budgets count different things ({counted}): their shares can't be compared with each other.")
    properties: list[tuple[str, set[str]]] = [
        ("measures", {result.measure for run in runs.all for result in run.results}),
    ]
    for unit in dict.fromkeys(run.unit for run in runs.all):
        what = "numbers of prunable weights" if unit == "weights" else f"numbers of {unit} before pruning"
        properties.append((what, {f"{run.size:,}" for run in runs.all if run.unit == unit}))
    for what, values in properties:
        if len(values) > 1:
            lines.append(f"The runs have different {what} ({', '.join(sorted(values))}): compare with care.")
    if runs.robust is not None:
        untested = [variant.label for variant in runs.variants if variant.after(runs.robust) is None]
        if untested:
            lines.append(f"Not tested under {attack_text(runs.robust)}: {_some(untested, runs)}.")
    return lines


def _images(runs: Runs) -> list[str]:
    """Warnings about tests or training on few images."""
    lines = []
    results = [result for run in runs.all for result in run.results]
    least = min((result.n for result in results), default=0)
    if 0 < least < _FEW:
        widest = max(result.high - result.low for result in results if result.n == least) / 2
        lines.append(f"Few test images ({least:,}): an accuracy is known to ± {per_cent(widest)} only.")
    kinds = (Curve, Distances, Corruptions)
    others = [record.n for run in runs.all for record in run.records if isinstance(record, kinds) and record.n]
    if others and min(others) < min(least, _FEW):
        lines.append(f"Curves, distances or corruptions were measured on few images ({min(others):,} and more).")
    tested, trained = _counts(runs, "evaluate", "examples"), _counts(runs, "data", "train")
    if tested:
        lines.append(f"Tested on a subset of the test set ({' or '.join(tested)} images, drawn by the seed).")
    if trained:
        lines.append(f"Trained on a part of the training set ({', '.join(trained)} images).")
    return lines


def _counts(runs: Runs, part: str, key: str) -> list[str]:
    """The numbers that the recipes give for a key."""
    contents = [run.recipe.get(part) for run in runs.all]
    counts = [content.get(key) for content in contents if isinstance(content, dict)]
    return [f"{count:,}" for count in sorted({count for count in counts if isinstance(count, int)})]


def origin(runs: Runs) -> Section | None:
    """Recipes, seeds, versions and data."""
    rows, folds = [], []
    for variant in runs.variants:
        for run in variant.runs:
            versions = next((result.versions for result in run.results if result.versions), {})
            known = (
                run.summary.recipe,
                run.data,
                run.summary.source,
                ", ".join(f"{k} {v}" for k, v in versions.items()),
            )
            rows.append([variant.label, str(run.seed), run.folder.name, *(text or "–" for text in known)])
        recipe = yaml.safe_dump(variant.runs[0].recipe, sort_keys=False, allow_unicode=True)
        folds.append(Fold(f"Recipe of {_title(variant)}", [Code(recipe)]))
    columns = ["network", "seed", "run", "recipe", "data", "source", "versions"]
    blocks: list[Block] = [Table(columns, rows, plain=True), *folds]
    return section("origin", blocks)


def _title(variant: Variant) -> str:
    return variant.label + (f" (seeds {variant.seeds}; the text is that of the first)" if len(variant.runs) > 1 else "")
