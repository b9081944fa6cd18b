"""Order in a heap of runs: which differ in the seed only, which are a method at several budgets, what comes first."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harp.evaluation.confidence import interval
from harp.experiments.records import Accuracy
from harp.reports.html.collect import Run

Key = tuple[str, float | None, str]  # an attack's name, epsilon and norm; ("natural", None, "") without one
NATURAL: Key = ("natural", None, "")
_TOLD_APART_BY = 2  # options in a label


@dataclass(frozen=True)
class Estimate:
    """An accuracy: of one run with the interval of its images, or the mean of several seeds with theirs."""

    value: float
    low: float
    high: float
    runs: int
    n: int

    @property
    def text(self) -> str:
        """In per cent, with half the interval."""
        return f"{100 * self.value:.1f} ± {50 * (self.high - self.low):.1f}"


def estimate(results: Sequence[Accuracy]) -> Estimate | None:
    """What some runs' numbers of the same kind come to."""
    if not results:
        return None
    first = results[0]
    if len(results) == 1:
        return Estimate(first.value, first.low, first.high, 1, first.n)
    low, high = spread([result.value for result in results])
    value = sum(result.value for result in results) / len(results)
    return Estimate(value, low, high, len(results), min(result.n for result in results))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of several seeds' shares, within [0, 1]."""
    mean, half = interval(values)
    return max(0.0, mean - half), min(1.0, mean + half)


@dataclass(frozen=True)
class Variant:
    """Runs that differ in the seed only."""

    method: str
    number: int  # of the method's style
    runs: Sequence[Run]

    @property
    def share(self) -> float:
        """The share of the budget's unit that is kept."""
        return sum(run.kept for run in self.runs) / sum(run.size for run in self.runs)

    @property
    def dense(self) -> bool:
        """Whether nothing was pruned."""
        return all(run.kept == run.size for run in self.runs)

    @property
    def kind(self) -> str:
        """What was pruned: weights or channels."""
        return self.runs[0].kind

    @property
    def unit(self) -> str:
        """What the budget counts."""
        return self.runs[0].unit

    @property
    def asked(self) -> float:
        """The share that the recipe asks for, or else as it came out: whole channels seldom meet it to the digit."""
        return _asked(self.runs[0])

    @property
    def budget(self) -> str:
        """The share in words: as the recipe asks for it, or else as it came out; of what, unless it is of weights."""
        share = share_text(self.asked)
        return share if self.unit == "weights" else f"{share} of the {self.unit}"

    @property
    def label(self) -> str:
        """Method and budget, in short."""
        if self.dense:
            return self.method
        return f"{self.method}, {share_text(self.asked)}{'' if self.unit == 'weights' else f' {self.unit}'}"

    @property
    def seeds(self) -> str:
        """The seeds in words."""
        return ", ".join(str(run.seed) for run in self.runs)

    def after(self, key: Key) -> Estimate | None:
        """An accuracy of the finished networks."""
        return estimate([result for run in self.runs for result in run.results if result.key == key])

    def before(self, key: Key) -> Estimate | None:
        """The same of the networks before pruning."""
        return estimate([result for run in self.runs for result in run.summary.dense if result.key == key])


def share_text(share: float) -> str:
    """A share in per cent, with as many digits as it needs."""
    return f"{100 * share:.3g} %"


@dataclass(frozen=True)
class Runs:
    """All runs of a report, in order."""

    all: Sequence[Run]
    variants: Sequence[Variant]
    attacks: Sequence[Key]  # that some run was tested under
    robust: Key | None  # the one that runs are compared by

    @property
    def methods(self) -> list[str]:
        """The names of the methods that prune, in the order of their styles."""
        found = {variant.method: variant.number for variant in self.variants if not variant.dense}
        return sorted(found, key=lambda method: found[method])

    @property
    def pruned(self) -> list[Variant]:
        """The variants that pruned something."""
        return [variant for variant in self.variants if not variant.dense]

    @property
    def units(self) -> list[str]:
        """What the budgets count: shares of different things are not compared."""
        return list(dict.fromkeys(variant.unit for variant in self.pruned or self.variants))

    @property
    def lead(self) -> Variant:
        """What to show first: at the smallest budget, what is best under attack (or without one).

        Of budgets that count different things, those of most networks.
        """
        every = self.pruned or list(self.variants)
        counted = [variant.unit for variant in every]
        pool = [variant for variant in every if variant.unit == max(self.units, key=counted.count)]
        budgets = {round(variant.asked, 4) for variant in pool}
        smallest = [variant for variant in pool if round(variant.asked, 4) == min(budgets)]
        key = self.robust or NATURAL
        return max(smallest, key=lambda variant: found.value if (found := variant.after(key)) else -1.0)

    def led(self) -> list[Variant]:
        """The variants, the first to show first."""
        lead = self.lead
        return [lead, *(variant for variant in self.variants if variant is not lead)]

    def class_name(self, run: Run, number: int) -> str:
        """A class in words, as a file of the run has it, or one of another run on the same data."""
        known = [other.classes for other in [run, *self.all] if other.data == run.data and other.classes]
        names = known[0] if known else []
        return names[number] if 0 <= number < len(names) else f"class {number}"

    def panels(self, variants: Iterable[Variant]) -> list[tuple[str, list[tuple[str, int, Variant]]]]:
        """Variants for drawing: title of a panel, and label, style and variant of each line in it.

        Several methods at several budgets are a panel a budget, and a method looks the same in all of them. One method
        at several budgets, or several methods at one, are one panel.
        """
        chosen = list(variants)
        budgets = list(dict.fromkeys(variant.budget for variant in chosen))
        if len(budgets) > 1 and len({variant.method for variant in chosen if not variant.dense}) > 1:
            return [
                (_of_what(budget), [(v.method, v.number, v) for v in chosen if v.budget == budget])
                for budget in budgets
            ]
        if len(budgets) == 1:
            return [("", [(variant.method, variant.number, variant) for variant in chosen])]
        return [("", [(variant.label, number, variant) for number, variant in enumerate(chosen)])] if chosen else []


def _of_what(budget: str) -> str:
    return budget if " of the " in budget else f"{budget} of the weights"


def arrange(runs: Sequence[Run]) -> Runs:
    """Group the runs: by what their budgets count, methods in the order given, budgets from large to small."""
    labels = _labels(runs)
    pruned = [label for run, label in zip(runs, labels, strict=True) if run.kept < run.size]
    numbers = {label: number for number, label in enumerate(dict.fromkeys([*pruned, *labels]))}
    groups: dict[tuple[str, str, int, str, str], list[Run]] = {}
    for run, label in zip(runs, labels, strict=True):
        groups.setdefault((label, run.unit, run.size, share_text(_asked(run)), _content(run.recipe)), []).append(run)
    variants = [
        Variant(label, numbers[label], sorted(group, key=lambda run: run.seed)) for (label, *_), group in groups.items()
    ]
    units = list(dict.fromkeys(run.unit for run in runs))
    variants.sort(key=lambda variant: (units.index(variant.unit), -round(variant.share, 6), variant.number))
    attacks = list(dict.fromkeys(result.key for run in runs for result in run.results if result.attack is not None))
    return Runs(runs, variants, attacks, _compared_by(runs, attacks))


def _compared_by(runs: Sequence[Run], attacks: Sequence[Key]) -> Key | None:
    """The attack that most runs were tested under, and of those at the epsilon of the recipes the strongest."""
    if not attacks:
        return None
    usual = [result.epsilon for run in runs for result in run.summary.results if result.attack is not None]
    usual = usual or [key[1] for key in attacks]
    epsilon = max(usual, key=usual.count)

    def rank(key: Key) -> tuple[int, bool, float]:
        values = [result.value for run in runs for result in run.results if result.key == key]
        return len(values), key[1] == epsilon, -sum(values) / len(values)

    return max(attacks, key=rank)


def _labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run's method: the pruner's, with its strategy, and with more where that is not enough."""
    plain = [_method(run.recipe) for run in runs]
    contents = [_content(run.recipe) for run in runs]
    labels = list(plain)
    # A pruned network's unit stands in its label anyway; a dense one has none.
    alike = [(name, run.unit if run.kept < run.size else "") for name, run in zip(plain, runs, strict=True)]
    for label, unit in sorted(set(alike)):
        mine = [number for number, other in enumerate(alike) if other == (label, unit)]
        places: dict[tuple[int, str], set[str]] = {}
        for number in mine:
            places.setdefault((runs[number].size, share_text(_asked(runs[number]))), set()).add(contents[number])
        if all(len(found) == 1 for found in places.values()) and len({size for size, _ in places}) == 1:
            continue
        flat = {number: dict(_flat(json.loads(contents[number]))) for number in mine}
        keys = dict.fromkeys(key for values in flat.values() for key in values)
        differ = [key for key in keys if len({repr(values.get(key)) for values in flat.values()}) > 1]
        for number in mine:
            own = [
                f"{key.rsplit('.', 1)[-1]}={flat[number][key]}"
                for key in differ[:_TOLD_APART_BY]
                if key in flat[number]
            ]
            labels[number] = f"{label}:{','.join(own)}" if own else label
    return labels


def pruner_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """The pruner that decided what is kept; dense if there was none."""
    pruners = [stage.get("pruner") for stage in recipe["stages"] if isinstance(stage, dict)]
    named = [{"name": pruner} if isinstance(pruner, str) else pruner for pruner in pruners]
    found = [p for p in named if isinstance(p, dict) and p.get("name") not in ("dense", "fixed")]
    return found[-1] if found else {"name": "dense"}


def _asked(run: Run) -> float:
    keep = pruner_of(run.recipe).get("keep")
    return keep if isinstance(keep, float) else run.kept / run.size


def _method(recipe: dict[str, Any]) -> str:
    pruner = pruner_of(recipe)
    strategy = pruner.get("strategy")
    extra = "" if strategy is None else f"+{strategy}" if isinstance(strategy, str) else "+given rates"
    return f"{pruner.get('name', 'unnamed')}{extra}"


def _content(recipe: dict[str, Any]) -> str:
    """What a recipe does, apart from its names, its seed, its budget and how it is tested."""
    rest = {key: value for key, value in recipe.items() if key not in ("name", "description", "seed", "evaluate")}
    return json.dumps(_without_keep(rest), sort_keys=True, default=str)


def _without_keep(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_keep(item) for key, item in value.items() if key != "keep"}
    return [_without_keep(item) for item in value] if isinstance(value, list) else value


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _flat(item, f"{path}.{number}")
    else:
        yield path, value
