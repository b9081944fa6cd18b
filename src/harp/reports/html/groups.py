"""Grouping of runs: which are of one data set and model, which differ only in the seed, and which to show first."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harp.evaluation.confidence import interval
from harp.experiments.records import Accuracy, CurvePoint
from harp.reports import names
from harp.reports.html.collect import Kind, Run
from harp.reports.plots import Chart, Series, shorten

Key = tuple[str, float | None, str]  # name, epsilon and norm of an attack
NATURAL: Key = ("natural", None, "")
_OPTIONS = 2  # in a label
Values = Sequence[float | None]
Points = tuple[Sequence[float], Values, Values, Values]  # x, y and the ends of intervals, which may be empty


@dataclass(frozen=True)
class Estimate:
    """An accuracy: of one run with the interval of its images, or the mean of several seeds with its interval."""

    value: float
    low: float
    high: float
    runs: int
    n: int

    @property
    def text(self) -> str:
        """In per cent, with half the interval."""
        return f"{100 * self.value:.1f} ± {50 * (self.high - self.low):.1f}"


def estimate(results: Sequence[Accuracy | CurvePoint]) -> Estimate | None:
    """The estimate of some runs' accuracies of one kind; the ends of an unknown interval are NaN.

    The interval of several seeds is that of their mean, within [0, 1].
    """
    if not results:
        return None
    values = [result.value for result in results]
    low, high = (math.nan if end is None else end for end in (results[0].low, results[0].high))
    if len(results) > 1:
        mean, half = interval(values)
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return Estimate(sum(values) / len(values), low, high, len(values), min(result.n or 0 for result in results))


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in the seed."""

    method: str
    style: int  # of the method, in charts
    runs: Sequence[Run]
    kind: str  # what was pruned: weights or channels
    unit: str  # what the budget counts
    share: float  # that is kept of it
    asked: float  # the share that the recipe asks for, or else the result: channels seldom meet a budget exactly
    budget: str  # the asked share in words
    label: str  # method and budget in short

    @property
    def dense(self) -> bool:
        """Whether nothing was pruned."""
        return self.share == 1

    @property
    def remark(self) -> str:
        """Why it must not look like any other: of some of its runs; empty if it may."""
        remarks = [run.remark for run in self.runs if run.remark]
        some = f" ({len(remarks)} of {len(self.runs)} seeds)" if 0 < len(remarks) < len(self.runs) else ""
        return f"{remarks[0]}{some}" if remarks else ""

    @property
    def seeds(self) -> str:
        """The seeds in words."""
        return ", ".join(str(run.seed) for run in self.runs)

    def after(self, key: Key) -> Estimate | None:
        """An accuracy of the finished networks."""
        return estimate([result for run in self.runs for result in run.results if result.key == key])

    def before(self, key: Key) -> Estimate | None:
        """An accuracy of the networks before pruning."""
        return estimate([result for run in self.runs for result in run.summary.dense if result.key == key])


@dataclass(frozen=True)
class Runs:
    """The runs of one data set and model, in order."""

    all: Sequence[Run]
    variants: Sequence[Variant]
    pruned: Sequence[Variant]
    methods: Sequence[str]  # that prune, in the order of their styles
    units: Sequence[str]  # what the budgets count: shares of different things are not compared
    attacks: Sequence[Key]  # that some run was tested under
    robust: Key | None  # the attack that runs are compared by

    @property
    def seeds(self) -> bool:
        """Whether some variant was run with several seeds."""
        return any(len(variant.runs) > 1 for variant in self.variants)

    @property
    def lead(self) -> Variant:
        """The variant to show first: at the smallest budget, the best under attack (or without one).

        If budgets count different things, it is one of those that most networks count.
        """
        variants = self.pruned or self.variants
        counted = [variant.unit for variant in variants]
        same = [variant for variant in variants if variant.unit == max(self.units, key=counted.count)]
        smallest = min(round(variant.asked, 4) for variant in same)
        results = [(variant, variant.after(self.robust or NATURAL)) for variant in same]
        smallest_first = [(v, result) for v, result in results if round(v.asked, 4) == smallest]
        return max(smallest_first, key=lambda pair: -1.0 if pair[1] is None else pair[1].value)[0]

    def led(self) -> list[Variant]:
        """The variants, with the one to show first in front."""
        lead = self.lead
        return [lead, *(variant for variant in self.variants if variant is not lead)]

    def records(self, kind: type[Kind]) -> list[tuple[Variant, Run, Kind]]:
        """What evaluations found of a kind, that of the variant to show first in front."""
        return [(variant, run, record) for variant in self.led() for run in variant.runs for record in run.of(kind)]

    def class_name(self, run: Run, number: int) -> str:
        """The name of a class, from a file of the run or of another run on the same data."""
        known = next((other.classes for other in [run, *self.all] if other.classes), [])
        name = known[number] if 0 <= number < len(known) else str(number)
        return f"class {name}" if name.isdecimal() else name

    @property
    def title(self) -> str:
        """The model and the data set in words."""
        return f"{names.model(self.all[0].model)} on {names.data(self.all[0].data)}"

    def panels(self, variants: Iterable[Variant]) -> list[tuple[str, list[tuple[str, int, Variant]]]]:
        """Variants for drawing: the title of a panel, and label, style and variant of each line in it.

        Several methods at several budgets get one panel per budget, with the same style per method in all of them. One
        method at several budgets, or several methods at one budget, get one panel.
        """
        chosen = list(variants)
        budgets = list(dict.fromkeys(variant.budget for variant in chosen))
        if len(budgets) > 1 and len({variant.method for variant in chosen if not variant.dense}) > 1:
            return [
                (_of_what(budget), [(v.method, v.style, v) for v in chosen if v.budget == budget]) for budget in budgets
            ]
        if len(budgets) == 1:
            return [("", [(variant.method, variant.style, variant) for variant in chosen])]
        return [("", [(variant.label, number, variant) for number, variant in enumerate(chosen)])] if chosen else []

    def charts(self, variants: Iterable[Variant], points: Callable[[Variant], Points], chart: Chart) -> list[Chart]:
        """A chart per panel, like `chart` and with its series first.

        All of them have the same horizontal axis.
        """
        charts = [
            replace(
                chart,
                title=title,
                series=[*chart.series, *(Series(name, style, *points(v)) for name, style, v in lines)],
            )
            for title, lines in self.panels(variants)
        ]
        along = [s.y if chart.rows else s.x for one in charts for s in one.series]
        known = [value for values in along for value in values if value]
        if not known or (chart.whole and chart.rows):
            return charts
        limits = (min(known) / 1.15, min(max(known) * 1.15, 100.0 if chart.unit == " %" else math.inf))
        return [replace(one, limits=limits if chart.log else (0.0, 1.03 * max(known))) for one in charts]


def _of_what(budget: str) -> str:
    return budget if " of the " in budget else f"{budget} of the weights"


def parts(runs: Sequence[Run]) -> list[Runs]:
    """The runs of each data set and model: only these are compared with each other."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.data, run.model), []).append(run)
    return [arrange(group) for group in groups.values()]


def arrange(runs: Sequence[Run]) -> Runs:
    """Group runs of one data set and model.

    By what their budgets count; methods in the order given, budgets from large to small.
    """
    labels = _labels(runs)
    methods = [label for run, label in zip(runs, labels, strict=True) if run.kept < run.size]
    styles = {label: number for number, label in enumerate(dict.fromkeys([*methods, *labels]))}
    groups: dict[tuple[str, str, int, str, str], list[Run]] = {}
    for run, label in zip(runs, labels, strict=True):
        groups.setdefault(
            (label, run.unit, run.size, names.budget(_asked(run)), repr(_options(run.recipe))), []
        ).append(run)
    variants = [_variant(label, styles[label], group) for (label, *_), group in groups.items()]
    units = list(dict.fromkeys(run.unit for run in runs))
    variants.sort(key=lambda variant: (units.index(variant.unit), -round(variant.share, 6), variant.style))
    pruned = [variant for variant in variants if not variant.dense]
    units = list(dict.fromkeys(variant.unit for variant in pruned or variants))
    attacks = list(dict.fromkeys(result.key for run in runs for result in run.results if result.attack is not None))
    return Runs(runs, variants, pruned, list(dict.fromkeys(methods)), units, attacks, _compared_by(runs, attacks))


def _variant(method: str, style: int, runs: Sequence[Run]) -> Variant:
    first, asked = runs[0], _asked(runs[0])
    share = sum(run.kept for run in runs) / sum(run.size for run in runs)
    budget = names.budget(asked) + ("" if first.unit == "weights" else f" of the {first.unit}")
    label = method if share == 1 else f"{method}, {names.budget(asked, first.unit)}"
    seeds = sorted(runs, key=lambda run: run.seed)
    return Variant(method, style, seeds, first.kind, first.unit, share, asked, budget, label)


def _compared_by(runs: Sequence[Run], attacks: Sequence[Key]) -> Key | None:
    """The attack that most runs were tested under; of several, the strongest at the epsilon of the recipes."""
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
    """A name for each run's method: pruner and strategy, and the options that differ if that is ambiguous."""
    labels, options = [names.method(_pruner_of(run.recipe)) for run in runs], [_options(run.recipe) for run in runs]
    # The unit of a pruned network is in its label anyway; a dense one has none.
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((labels[index], run.unit if run.kept < run.size else ""), []).append(index)
    for (label, _), members in groups.items():
        recipes: dict[tuple[int, str], set[str]] = {}  # at each budget
        for index in members:
            recipes.setdefault((runs[index].size, names.budget(_asked(runs[index]))), set()).add(repr(options[index]))
        if all(len(same) == 1 for same in recipes.values()) and len({size for size, _ in recipes}) == 1:
            continue
        keys = dict.fromkeys(key for index in members for key in options[index])
        differ = [key for key in keys if len({repr(options[index].get(key)) for index in members}) > 1][:_OPTIONS]
        for index in members:
            words = [f"{_said(key)} {shorten(str(options[index][key]), 20)}" for key in differ if key in options[index]]
            labels[index] = f"{label} ({', '.join(words)})" if words else label
    return labels


def _pruner_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """The pruner that decided what is kept; dense if there was none."""
    pruners = [stage.get("pruner") for stage in recipe["stages"] if isinstance(stage, dict)]
    named = [{"name": pruner} if isinstance(pruner, str) else pruner for pruner in pruners]
    chosen = [p for p in named if isinstance(p, dict) and p.get("name") not in ("dense", "fixed")]
    return chosen[-1] if chosen else {"name": "dense"}


def _asked(run: Run) -> float:
    keep = _pruner_of(run.recipe).get("keep")
    return keep if isinstance(keep, float) else run.kept / run.size


def _said(key: str) -> str:
    """The last word of an option's path; the name of a part of the recipe goes by that part."""
    return key.removesuffix(".name").rsplit(".", 1)[-1].replace("_", " ")


def _options(recipe: dict[str, Any]) -> dict[str, Any]:
    """What a recipe does, apart from its names, its seed, its budget and how it is tested, sorted by key."""
    rest = {key: value for key, value in recipe.items() if key not in ("name", "description", "seed", "evaluate")}
    return dict(sorted(_flat(rest), key=lambda pair: pair[0]))


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "keep":
                yield from _flat(item, f"{path}.{key}")
    else:
        yield path, value
