"""The report's chapter on where its numbers come from, and what a reader has to be warned of."""

from collections.abc import Sequence
from typing import Any

import yaml

from harp.experiments.records import Checks, Corruptions, Curve, Distances
from harp.reports.html.accuracy import attack_text, per_cent
from harp.reports.html.blocks import Block, Code, Fold, Section, Table
from harp.reports.html.collect import Run
from harp.reports.html.groups import NATURAL, Runs, Variant

_FEW = 1000  # images: below, half an interval is more than three points
_NAMES = 3  # of runs in a warning


def notes(runs: Runs, without_weights: Sequence[str]) -> list[str]:
    """What has to be known before the numbers are believed, the gravest first."""
    found = [*_false_robustness(runs), *_unmet(runs), *_unlike(runs), *_tested(runs)]
    bare = [variant.label for variant in runs.variants if not any(run.found or run.unknown for run in variant.runs)]
    if bare:
        found.append(f"No evaluation beyond the run's own tests was found for {_some(bare, len(runs.variants))}.")
    pgd = runs.robust is not None and not any("autoattack" in key[0].lower() or key[0] == "aa" for key in runs.attacks)
    if pgd and runs.robust is not None:
        found.append(f"No run was tested by an ensemble of attacks; {runs.robust[0]} alone can be too optimistic.")
    if runs.robust is None:
        found.append("No run was tested under attack: nothing here says how robust these networks are.")
    if len(runs.pruned) > 1 and all(len(variant.runs) == 1 for variant in runs.pruned):
        found.append("One seed each: differences between networks may be those of seeds.")
    gone = [v.label for v in runs.variants if any(None in run.stages.values() for run in v.runs)]
    if gone:
        found.append(
            f"The stages' folders are missing for {_some(gone, len(runs.variants))}: their learning is not shown."
        )
    if without_weights:
        found.append(f"There is no file of weights for {_some(without_weights, len(runs.variants))}.")
    found += [
        f"{run.folder.name}: evaluation/{name} is of a kind that is not known here."
        for run in runs.all
        for name in run.unknown
    ]
    return found


def warnings(runs: Runs) -> list[str]:
    """What the runs themselves warn of: networks at chance level, budgets that were not met in training."""
    single = len(runs.all) == 1
    return [
        text if single else f"{variant.label}, seed {run.seed}: {text}"
        for variant in runs.variants
        for run in variant.runs
        for text in run.summary.warnings or ()
    ]


def _some(names: Sequence[str], of: int) -> str:
    if len(names) == of > 1:
        return "any network" if of > 1 else names[0]
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def _false_robustness(runs: Runs) -> list[str]:
    found = []
    for variant in runs.variants:
        bad = [f.check for run in variant.runs for one in run.of(Checks) for f in one.findings if f.verdict == "bad"]
        if bad:
            names = ", ".join(dict.fromkeys(bad))
            found.append(f"{variant.label}: a check for false robustness failed ({names}); see below.")
        natural = variant.after(NATURAL)
        for key in runs.attacks:
            after = variant.after(key)
            if natural and after and after.value > natural.value:
                found.append(
                    f"{variant.label}: more accurate under {attack_text(key)} than without: the attack failed."
                )
    return found


def _unmet(runs: Runs) -> list[str]:
    late = [variant.label for variant in runs.variants if any(map(_never_ready, variant.runs))]
    if not late:
        return []
    return [
        f"The budget was not met in training by {_some(late, len(runs.variants))}: the last epoch's rates were scaled "
        "to it. Train longer, or let γ grow faster."
    ]


def _never_ready(run: Run) -> bool:
    """The same for runs of older versions, which do not warn of it themselves."""
    if run.summary.warnings is not None:
        return False
    files = [file for file in run.stages.values() if file and any("ready" in record for record in file.history)]
    return any(not any(record.get("ready", True) for record in file.history) for file in files)


def _unlike(runs: Runs) -> list[str]:
    """Differences that make a comparison unfair."""
    if len(runs.all) == 1:
        return []
    found = []
    if len(runs.units) > 1:
        counted = ", ".join(runs.units)
        found.append(f"The budgets count different things ({counted}): their shares can't be compared with each other.")
    pairs: list[tuple[str, set[str]]] = [
        ("data sets", {run.data for run in runs.all}),
        ("measures", {result.measure for run in runs.all for result in run.results}),
    ]
    for unit in dict.fromkeys(run.unit for run in runs.all):
        what = "numbers of prunable weights" if unit == "weights" else f"numbers of {unit} before pruning"
        pairs.append((what, {f"{run.size:,}" for run in runs.all if run.unit == unit}))
    for what, values in pairs:
        if len(values) > 1:
            found.append(f"The runs have different {what} ({', '.join(sorted(values))}): compare with care.")
    if runs.robust is not None:
        lacking = [variant.label for variant in runs.variants if variant.after(runs.robust) is None]
        if lacking:
            found.append(f"Not tested under {attack_text(runs.robust)}: {_some(lacking, len(runs.variants))}.")
    return found


def _tested(runs: Runs) -> list[str]:
    found = []
    results = [result for run in runs.all for result in run.results]
    least = min((result.n for result in results), default=0)
    if 0 < least < _FEW:
        widest = max(result.high - result.low for result in results if result.n == least) / 2
        found.append(f"Few test images ({least:,}): an accuracy is known to ± {per_cent(widest)} only.")
    others: list[int] = []
    for run in runs.all:
        records: list[Curve | Distances | Corruptions] = [*run.of(Curve), *run.of(Distances), *run.of(Corruptions)]
        others += [record.n for record in records if record.n]
    if others and min(others) < min(least, _FEW):
        found.append(f"Curves, distances or corruptions were measured on few images ({min(others):,} and more).")
    drawn = [_examples(run) for run in runs.all]
    counts = sorted({count for count in drawn if count is not None})
    if counts:
        shown = " or ".join(f"{count:,}" for count in counts)
        found.append(f"Tested on a subset of the test set ({shown} images, drawn by the seed).")
    part = sorted({count for run in runs.all if isinstance(count := _of(run, "data", "train"), int)})
    if part:
        found.append(f"Trained on a part of the training set ({', '.join(f'{count:,}' for count in part)} images).")
    return found


def _examples(run: Run) -> int | None:
    count = _of(run, "evaluate", "examples")
    return count if isinstance(count, int) else None


def _of(run: Run, part: str, key: str) -> object:
    content = run.recipe.get(part)
    return content.get(key) if isinstance(content, dict) else None


def origin(runs: Runs) -> Section:
    """Recipes, seeds, versions and data."""
    columns = ["network", "seed", "run", "recipe", "data", "source", "versions"]
    rows = [
        [
            variant.label,
            str(run.seed),
            run.folder.name,
            run.summary.recipe,
            run.data or "–",
            run.summary.source or "–",
            ", ".join(f"{name} {version}" for name, version in _versions(run).items()) or "–",
        ]
        for variant in runs.variants
        for run in variant.runs
    ]
    blocks: list[Block] = [Table(columns, rows, plain=True)]
    blocks += [Fold(f"Recipe of {_title(variant)}", [Code(recipe_text(variant.runs[0]))]) for variant in runs.variants]
    lead = "The same recipe, seed, data and versions give the same numbers again: `harp run recipe.yaml`."
    return Section("origin", "Where the numbers come from", lead, blocks)


def _title(variant: Variant) -> str:
    return variant.label + (f" (seeds {variant.seeds}; the text is that of the first)" if len(variant.runs) > 1 else "")


def _versions(run: Run) -> dict[str, Any]:
    return next((result.versions for result in run.results if result.versions), {})


def recipe_text(run: Run) -> str:
    """The recipe as it was, without paths of the machine."""
    return yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
