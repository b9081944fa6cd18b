"""The report's chapters on accuracy: all runs, over sparsity, over epsilon, by class, and attack by attack."""

import math
from collections.abc import Sequence

from harp.evaluation import score
from harp.evaluation.score import Score
from harp.experiments.records import Accuracy, Curve, CurvePoint, Distances
from harp.reports.html.blocks import Block, Figure, Fold, Section, Table, figure, folded, section
from harp.reports.html.groups import NATURAL, Estimate, Points, Runs, Values, Variant, estimate
from harp.reports.html.groups import Key as Attack
from harp.reports.plots import Chart, Level, Series
from harp.system.progress import duration

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
    """Every accuracy of every run."""
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
    measures = " and ".join(sorted({result.measure for run in runs.all for result in run.results})).capitalize()
    intervals = "Intervals are 95 % intervals over the test images."
    if runs.seeds:
        intervals = "For several seeds: their mean and its 95 % interval (Student's t)."
    blocks = [_overview(runs), Fold("Every number of every run", [Table(columns, rows)])]
    return section("results", blocks, measures=measures, intervals=intervals)


def _overview(runs: Runs) -> Figure:
    tests = [NATURAL, *runs.attacks]
    networks = [(variant.label, {key: variant.after(key) for key in tests}) for variant in runs.variants]
    facts = [(str(len(variant.runs)), _kept(runs, variant)) for variant in runs.variants]
    shown = [
        key for key in tests if key == NATURAL or 2 * sum(r[key] is not None for _, r in networks) >= len(networks)
    ]
    before = {key: _dense_level(runs.pruned, key) for key in tests}
    if any(before.values()) and len(runs.pruned) == len(runs.variants):  # else a dense run shows it
        networks.insert(0, ("before pruning", before))
        facts.insert(0, ("", ""))
    series = [
        Series(attack_text(key), number, range(len(networks)), *_percentages([results[key] for _, results in networks]))
        for number, key in enumerate(shown)
    ]
    chart = Chart("", "accuracy (%)", "", series, [label for label, _ in networks], "marks", unit=" %", whole=True)
    kept = f"{runs.units[0]} kept" if len(runs.units) == 1 else "kept"
    rows = [
        [label, *cells, *(_text(results[key]) for key in tests)]
        for (label, results), cells in zip(networks, facts, strict=True)
    ]
    note = "Accuracies in per cent, ± half the 95 % interval."
    return figure("overview", [chart], Table(["network", "seeds", kept, *map(attack_text, tests)], rows, note=note))


def _kept(runs: Runs, variant: Variant) -> str:
    counts = dict.fromkeys(f"{run.kept:,}" for run in variant.runs)
    unit = f" {variant.unit}" if len(runs.units) > 1 else ""
    return " / ".join(counts) + f" of {variant.runs[0].size:,}{unit}"


def _dense_level(pruned: Sequence[Variant], key: Attack) -> Estimate | None:
    """The accuracy of the dense networks that the pruned ones started from, each seed once."""
    runs = [run for variant in pruned for run in variant.runs]
    once = {(run.seed, one.value): one for run in runs for one in run.summary.dense if one.key == key}
    return estimate(list(once.values()))


def sparsity(runs: Runs) -> Section | None:
    """Accuracy over what is kept, one line per method, one figure for each thing that budgets count."""
    figures = [_sparsity(runs, unit) for unit in runs.units] if len(runs.pruned) > 1 else []
    units = f" Shares of {', '.join(runs.units)} are not the same thing: each has its own figure."
    return section("sparsity", figures, units=units if len(figures) > 1 else "")


def _sparsity(runs: Runs, unit: str) -> Figure:
    pruned = [variant for variant in runs.pruned if variant.unit == unit]
    keys = [key for key in (_tested_under(runs, pruned), NATURAL) if key is not None]
    by_method = {method: [v for v in pruned if v.method == method] for method in runs.methods}
    further = "sparser" if unit == "weights" else "smaller"
    charts = []
    for key in keys:
        dense = _dense_level(pruned, key)
        series = [
            Series(method, own[0].style, [100 * v.share for v in own], *_percentages([v.after(key) for v in own]))
            for method, own in by_method.items()
            if own
        ]
        chart = Chart(
            "without attack" if key == NATURAL else f"under attack: {attack_text(key)}",
            f"{unit} kept (%, log scale; {further} to the right)",
            "accuracy (%)",
            series,
            log=True,
            budgets=sorted({float(f"{100 * variant.asked:.3g}") for variant in pruned}),
            unit=" %",
            levels=[Level(100 * dense.value, "dense", 50 * (dense.high - dense.low))] if dense else [],
        )
        charts.append(chart)
    rows = [
        [
            variant.method,
            variant.budget,
            str(len(variant.runs)),
            *(cell for key in keys for cell in (_text(variant.after(key)), _change(variant, key))),
        ]
        for variant in pruned
    ]
    columns = ["method", "kept", "seeds", *(text for key in keys for text in (attack_text(key), "change"))]
    table = Table(columns, rows, note="Change: against the dense network, in percentage points.")
    return figure("sparsity", charts, table, what="sparsity" if unit == "weights" else unit, unit=unit)


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
        blocks.append(Table(columns, rows, "The worst class everywhere"))
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
