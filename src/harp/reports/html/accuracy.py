"""The report's chapters on accuracy: all runs, over sparsity, over epsilon, by class, and attack by attack."""

import math
from collections.abc import Sequence

from harp.evaluation import score
from harp.evaluation.chance_level import constant_accuracy
from harp.evaluation.score import Score
from harp.experiments.records import Accuracy, Curve, CurvePoint, Distances
from harp.reports.html.blocks import Block, Figure, Fold, Section, Table, figure, folded, section
from harp.reports.html.groups import NATURAL, Estimate, Points, Runs, Values, Variant, estimate
from harp.reports.html.groups import Key as Attack
from harp.reports.plots import Chart, Level, Measured, Series, comparison
from harp.system.progress import duration

_BEFORE = 13  # the style of the network before pruning, which few comparisons use otherwise
_QUANTILES = 60  # points of a curve of distances


def epsilon_text(epsilon: float | None) -> str:
    """Epsilon in 255ths if that is a round number."""
    return score.epsilon_text({"attack": {"epsilon": epsilon}})


def attack_text(key: Attack) -> str:
    """An attack in words."""
    name, epsilon, norm = key
    if epsilon is None:
        return name
    return f"{name}, ε {epsilon_text(epsilon)}" + (f" {norm}" if norm and norm != "linf" else "")


def per_cent(value: float | None) -> str:
    """A share in per cent."""
    return "–" if value is None else f"{100 * value:.1f} %"


def interval_text(low: float, high: float) -> str:
    """An interval in per cent."""
    return "–" if math.isnan(low) else f"{100 * low:.1f} – {100 * high:.1f} %"


def points_text(change: float) -> str:
    """A change of an accuracy in percentage points."""
    return f"{100 * change:+.1f}".replace("-", "−")


def _text(result: Estimate | None) -> str:
    return "–" if result is None else result.text


def _percentages(results: Sequence[Estimate | None]) -> tuple[Values, Values, Values]:
    """Values and ends of intervals for a chart."""
    return (
        [None if result is None else 100 * result.value for result in results],
        [None if result is None else 100 * result.low for result in results],
        [None if result is None else 100 * result.high for result in results],
    )


def results(runs: Runs) -> Section | None:
    """The accuracies of all networks: side by side for one budget, over the budgets for several."""
    everything = _every_number(runs)
    single = len(runs.all) == 1
    figures = [_before_and_after(runs, everything)] if single else [_compared(runs, unit) for unit in runs.units]
    measures = " and ".join(sorted({result.measure for run in runs.all for result in run.results})).capitalize()
    intervals = "Intervals are 95 % intervals over the test images."
    if runs.seeds:
        intervals = "For several seeds: their mean and its 95 % interval (Student's t)."
    units = f" Shares of {', '.join(runs.units)} are not the same thing: each has its own figure."
    blocks = [*figures, *([] if single else [Fold("Every number of every run", [everything])])]
    more = units if len(figures) > 1 else ""
    return section("results", blocks, measures=measures, intervals=intervals, units=more)


def _every_number(runs: Runs) -> Table:
    columns = ["run", "seed", "test", "before", "after", "95 % interval", "images"]
    rows = []
    for variant in runs.variants:
        for run in variant.runs:
            before = {result.key: result.value for result in run.summary.dense}
            rows += [
                [
                    variant.label,
                    str(run.seed),
                    attack_text(result.key),
                    per_cent(before.get(result.key)),
                    per_cent(result.value),
                    interval_text(result.low, result.high),
                    f"{result.n:,}",
                ]
                for result in run.results
            ]
    return Table(columns, rows)


def _before_and_after(runs: Runs, table: Table) -> Figure:
    """The tests of a single run, before and after pruning."""
    lead = runs.lead
    tests = [NATURAL, *runs.attacks]
    hollow = range(len(tests) if lead.remark else 0)
    before, after = (_percentages([of(key) for key in tests]) for of in (lead.before, lead.after))
    series = [Series(lead.label, 1, range(len(tests)), *after, hollow=hollow)]
    if any(value is not None for value in before[0]):
        series.insert(0, Series("before pruning", _BEFORE, range(len(tests)), *before))
    levels, below = [], "accuracy (%)"
    if lead.remark:
        levels, below = [Level(_chance(runs), "")], f"{below}; dashed: always the same answer"
    rows = [attack_text(key) for key in tests]
    chart = Chart("", below, "", series, rows, "bars", unit=" %", whole=True, levels=levels)
    return figure("single", [chart], table)


def _compared(runs: Runs, unit: str) -> Figure:
    """The networks whose budget counts `unit`, and the dense ones."""
    networks = [variant for variant in runs.variants if variant.dense or variant.unit == unit]
    pruned = [variant for variant in networks if not variant.dense]
    keys = [key for key in (_tested_under(runs, pruned or networks), NATURAL) if key is not None]
    tests = {key: "without attack" if key == NATURAL else f"under {attack_text(key)}" for key in keys}
    others = [key for key in runs.attacks if key not in keys]  # in the table only
    several = len({variant.budget for variant in pruned}) > 1
    measured = [
        Measured(
            variant.method if several else variant.label,
            variant.style,
            None if variant.dense else 100 * variant.asked,
            {tests[key]: _triple(variant.after(key)) for key in keys},
            variant.remark,
        )
        for variant in networks
    ]
    before = {key: _common_start(pruned, key) for key in keys}
    rows = [
        [
            variant.label,
            str(len(variant.runs)),
            _kept(runs, variant),
            *(cell for key in keys for cell in (_text(variant.after(key)), _change(variant, key))),
            *(_text(variant.after(key)) for key in others),
            variant.remark,
        ]
        for variant in networks
    ]
    if any(before.values()) and len(pruned) == len(networks):  # else a dense run shows it
        results = {tests[key]: _triple(before[key]) for key in keys}
        measured.insert(0, Measured("before pruning", _BEFORE, None, results))
        cells = [cell for key in keys for cell in (_text(before[key]), "")]
        cells += [_text(_common_start(pruned, key)) for key in others]
        rows.insert(0, ["before pruning", "", "", *cells, ""])
    chance = _chance(runs) if any(variant.remark for variant in networks) else None
    charts = comparison(measured, list(tests.values()), unit, chance)
    kept = f"{runs.units[0]} kept" if len(runs.units) == 1 else "kept"
    columns = ["network", "seeds", kept, *(text for key in keys for text in (attack_text(key), "change"))]
    columns += [*map(attack_text, others), ""]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    note = "Accuracies in per cent, ± half the 95 % interval. Change: points against the network before pruning."
    name = "sparsity" if several else "overview"
    return figure(
        name, charts, Table(columns, rows, note=note), what="sparsity" if unit == "weights" else unit, unit=unit
    )


def _triple(result: Estimate | None) -> tuple[float, float, float] | None:
    return None if result is None else (100 * result.value, 100 * result.low, 100 * result.high)


def _chance(runs: Runs) -> float:
    """The accuracy of always the same answer, in per cent."""
    clean = max((result for run in runs.all for result in run.results), key=lambda result: result.key == NATURAL)
    return 100 * constant_accuracy(clean.totals, clean.measure.startswith("balanced")) if any(clean.totals) else 0.0


def _kept(runs: Runs, variant: Variant) -> str:
    counts = dict.fromkeys(f"{run.kept:,}" for run in variant.runs)
    unit = f" {variant.unit}" if len(runs.units) > 1 else ""
    return " / ".join(counts) + f" of {variant.runs[0].size:,}{unit}"


def _common_start(pruned: Sequence[Variant], key: Attack) -> Estimate | None:
    """The accuracy of the dense network that all of them started from, one a seed; None if they had different ones."""
    by_seed: dict[int, list[Accuracy]] = {}
    for run in (run for variant in pruned for run in variant.runs):
        by_seed.setdefault(run.seed, []).extend(one for one in run.summary.dense if one.key == key)
    if any(len({one.value for one in same}) > 1 for same in by_seed.values()):
        return None
    return estimate([same[0] for same in by_seed.values() if same])


def _tested_under(runs: Runs, variants: Sequence[Variant]) -> Attack | None:
    """The attack that all runs are compared by, or, if none of these was tested by it, the attack of most of them."""
    tested = {key: sum(variant.after(key) is not None for variant in variants) for key in runs.attacks}
    if runs.robust and tested[runs.robust]:
        return runs.robust
    return max((key for key in tested if tested[key]), key=lambda key: tested[key], default=None)


def _change(variant: Variant, key: Attack) -> str:
    before, after = variant.before(key), variant.after(key)
    return "–" if before is None or after is None else points_text(after.value - before.value)


def curves(runs: Runs) -> Section | None:
    """Accuracy over epsilon, and the distances at which images break."""
    kinds = dict.fromkeys((curve.attack, curve.norm) for run in runs.all for curve in run.of(Curve))
    figures = [_curve_figure(runs, attack, norm) for attack, norm in kinds]
    kinds = dict.fromkeys((record.attack, record.norm) for run in runs.all for record in run.of(Distances))
    figures += [_distance_figure(runs, attack, norm) for attack, norm in kinds]
    return section("curves", figures)


def _curve_figure(runs: Runs, attack: str, norm: str) -> Figure:
    curves = {variant.label: _curve(variant, attack, norm) for variant in runs.variants}
    variants = [variant for variant in runs.variants if curves[variant.label]]

    def points(variant: Variant) -> Points:
        curve = curves[variant.label]
        return list(curve), *_percentages(list(curve.values()))

    rows = [
        [variant.label, f"{epsilon:.4g}", per_cent(result.value), interval_text(result.low, result.high)]
        for variant in variants
        for epsilon, result in curves[variant.label].items()
    ]
    chart = Chart("", f"ε, size of the perturbation ({norm})", "accuracy (%)", [], unit=" %", whole=True)
    table = Table(["network", "ε", "accuracy", "95 % interval"], rows)
    return figure("curve", runs.charts(variants, points, chart), table, attack=attack, norm=norm)


def _curve(variant: Variant, attack: str, norm: str) -> dict[float, Estimate]:
    """The accuracy at each epsilon."""
    curves = [curve for run in variant.runs for curve in run.of(Curve) if (curve.attack, curve.norm) == (attack, norm)]
    by_epsilon: dict[float, list[CurvePoint]] = {}
    for point in (point for curve in curves for point in curve.points):
        by_epsilon.setdefault(point.epsilon, []).append(point)
    estimates = {epsilon: estimate(points) for epsilon, points in sorted(by_epsilon.items())}
    return {epsilon: result for epsilon, result in estimates.items() if result is not None}


def _distance_figure(runs: Runs, attack: str, norm: str) -> Figure:
    pooled: dict[str, list[float]] = {}
    for variant in runs.variants:
        records = [one for run in variant.runs for one in run.of(Distances) if (one.attack, one.norm) == (attack, norm)]
        pooled[variant.label] = sorted(math.inf if v is None else v for record in records for v in record.values)
    rows = [
        [label, f"{len(values):,}", *(_quantile(values, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9))]
        for label, values in pooled.items()
        if values
    ]
    chart = Chart("", f"distance ({norm})", "images not yet broken (%)", [], unit=" %", whole=True, marked=False)
    tested = [variant for variant in runs.variants if pooled[variant.label]]
    charts = runs.charts(tested, lambda variant: _survival(pooled[variant.label]), chart)
    table = Table(["network", "images", "10 %", "25 %", "median", "75 %", "90 %"], rows, note="Quantiles of distance.")
    return figure("distances", charts, table, attack=attack, norm=norm)


def _survival(values: Sequence[float]) -> Points:
    """Distances, and the share of images that are not broken at them."""
    count = len(values)
    places = sorted({round(step * (count - 1) / _QUANTILES) for step in range(_QUANTILES + 1)})
    finite = [place for place in places if math.isfinite(values[place])]
    shares = [100 * (1 - (place + 1) / count) for place in finite]
    return [0.0, *(values[place] for place in finite)], [100.0, *shares], (), ()


def _quantile(values: Sequence[float], share: float) -> str:
    value = values[round(share * (len(values) - 1))]
    return f"{value:.3g}" if math.isfinite(value) else "never"


def classes(runs: Runs) -> Section | None:
    """Accuracy by class, and the worst one."""
    key = runs.robust or NATURAL
    tested = [(variant, _by_class(variant, key)) for variant in runs.led()]
    tested = [(variant, by_class) for variant, by_class in tested if any(by_class)]
    if not tested:
        return None
    lead, by_class = tested[0]
    names = [runs.class_name(lead.runs[0], number) for number in range(len(by_class))]
    tests = {test: _by_class(lead, test) for test in dict.fromkeys((NATURAL, key))}
    tests = {test: results for test, results in tests.items() if len(results) == len(names)}
    series = [
        Series(attack_text(test), number, range(len(names)), *_percentages(results))
        for number, (test, results) in enumerate(tests.items())
    ]
    columns = ["class", *map(attack_text, tests), "images"]
    cells = [
        [name, *(per_cent(one.value if one else None) for one in results), f"{results[-1].n if results[-1] else 0:,}"]
        for name, *results in zip(names, *tests.values(), strict=True)
    ]
    table = Table(columns, cells)
    chart = Chart("", "accuracy (%)", "", series, names, "bars", unit=" %", whole=True)
    rows = []
    for variant, results in tested:
        known = {number: result for number, result in enumerate(results) if result}
        worst = min(known, key=lambda number: known[number].value)
        best = max(result.value for result in known.values())
        mean = sum(result.value * result.n for result in known.values()) / sum(result.n for result in known.values())
        name = runs.class_name(variant.runs[0], worst)
        rows.append([variant.label, name, *map(per_cent, (known[worst].value, best, mean))])
    facts = {"network": lead.label, "worst": rows[0][1], "share": rows[0][2], "attack": attack_text(key)}
    blocks: list[Block] = [figure("classes", [chart], table, **facts)]
    if len(rows) > 1:
        columns = ["network", "worst class", "its accuracy", "the best class's", "all"]
        blocks.append(Fold("The worst class of every network", [Table(columns, rows)]))
    return section("classes", blocks)


def _by_class(variant: Variant, key: Attack) -> list[Estimate | None]:
    """The accuracy of each class, over all seeds; None for a class without images."""
    tested = [result for run in variant.runs for result in run.results if result.key == key and result.totals]
    tested = [result for result in tested if len(result.totals) == len(result.correct) == len(tested[0].totals)]
    results: list[Estimate | None] = []
    for right, total in zip(
        map(sum, zip(*(result.correct for result in tested), strict=True)),
        map(sum, zip(*(result.totals for result in tested), strict=True)),
        strict=True,
    ):
        low, high = Score("", (right,), (total,)).interval() if total else (0.0, 0.0)
        results.append(Estimate(right / total, low, high, len(tested), total) if total else None)
    return results


def parts(runs: Runs) -> Section | None:
    """The result of each attack of an ensemble."""
    tables = [
        _parts(f"{variant.label}, seed {run.seed}", result)
        for variant in runs.led()
        for run in variant.runs
        for result in run.results
        if result.parts
    ]
    return section("parts", folded(tables, "networks"))


def _parts(network: str, result: Accuracy) -> Table:
    rows = [
        [
            f"{part.attack} ({part.words})" if part.words else part.attack,
            f"{part.tried:,}",
            f"{part.fooled:,}",
            f"{part.left:,}",
            per_cent(part.left / result.n),
            "–" if part.seconds is None else duration(part.seconds),
        ]
        for part in result.parts
    ]
    note = ""
    if result.during is not None and abs(result.during - result.value) > 1e-9:
        note = (
            f"Counted while attacking: {100 * result.during:.2f} %; the found images, classified once more: "
            f"{100 * result.value:.2f} %. The second number is the one that is reported."
        )
    title = f"{network}: {attack_text(result.key)}, {per_cent(result.value)} left"
    return Table(["attack", "tried", "fooled", "left", "accuracy so far", "time"], rows, title, note)
