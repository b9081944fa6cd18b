"""The report's chapters on accuracy: all runs, over sparsity, over epsilon, by class, and what each attack did."""

import math
from collections.abc import Sequence
from itertools import pairwise

from harp.evaluation import score
from harp.evaluation.score import Score
from harp.experiments.records import Accuracy, Curve, Distances
from harp.reports.html import chart, scale
from harp.reports.html.blocks import Block, Figure, Fold, Key, Panel, Section, Table, folded
from harp.reports.html.chart import Axis, Level, Point, Series
from harp.reports.html.groups import NATURAL, Estimate, Runs, Variant, estimate, spread
from harp.reports.html.groups import Key as Attack
from harp.system.progress import duration

_MOST_QUANTILES = 60


def epsilon_text(epsilon: float | None) -> str:
    """Epsilon in 255ths where that is a round number."""
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


def _text(found: Estimate | None) -> str:
    return "–" if found is None else found.text


def _tests(runs: Runs) -> list[Attack]:
    return [NATURAL, *runs.attacks]


def results(runs: Runs) -> Section:
    """Every accuracy of every run."""
    blocks: list[Block] = [_overview(runs)]
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
                    f"{100 * result.low:.1f} – {100 * result.high:.1f} %",
                    f"{result.n:,}",
                ]
                for result in run.results
            ]
    blocks.append(Fold("Every number of every run", [Table(columns, rows)]))
    return Section("results", "Accuracy", _measured(runs), blocks)


def _measured(runs: Runs) -> str:
    measures = sorted({result.measure for run in runs.all for result in run.results})
    of_seeds = any(len(variant.runs) > 1 for variant in runs.variants)
    means = (
        "Where several seeds were run: their mean and its 95 % interval (Student's t)."
        if of_seeds
        else "Intervals are 95 % intervals over the test images."
    )
    return f"{' and '.join(measures).capitalize()} on the test set, without an attack and under attack. {means}"


def _overview(runs: Runs) -> Figure:
    variants, tests, every = list(runs.variants), _shown_tests(runs), _tests(runs)
    before = {key: _dense_level(runs.pruned, key) for key in every}
    told = not any(variant.dense for variant in variants) and any(before.values())  # else the dense runs tell it
    lines = [(variant.label, {key: variant.after(key) for key in every}) for variant in variants]
    if told:
        lines.insert(0, ("before pruning", before))
    series = []
    for number, key in enumerate(tests):
        points = []
        for row, (label, values) in enumerate(lines):
            found = values[key]
            if found:
                text = f"{label}, {attack_text(key)}: {found.text} %"
                points.append(Point(row, 100 * found.value, 100 * found.low, 100 * found.high, text))
        series.append(Series(attack_text(key), number, points))
    names = [label for label, _ in lines]
    axis = Axis("accuracy (%)", scale.fit([0.0, 100.0], room=0.0))
    svg = chart.rows("Accuracy of every network", names, series, axis)
    what = f"{runs.units[0]} kept" if len(runs.units) == 1 else "kept"
    columns = ["network", "seeds", what, *(attack_text(key) for key in every)]
    rows = [
        [variant.label, str(len(variant.runs)), _kept(runs, variant), *(_text(variant.after(key)) for key in every)]
        for variant in variants
    ]
    if told:
        rows.insert(0, ["before pruning", "", "", *(_text(before[key]) for key in every)])
    return Figure(
        "Accuracy of every network",
        "A row a network, a mark a test; the bar through a mark is its 95 % interval. Networks whose bars overlap far "
        "are not told apart by this test.",
        [Panel(svg)],
        Table(columns, rows, note="Accuracies in per cent, ± half the 95 % interval."),
        [Key(attack_text(key), number, joined=False) for number, key in enumerate(tests)],
    )


def _shown_tests(runs: Runs) -> list[Attack]:
    """Natural, and the attacks that at least half of the networks were tested under."""
    half = len(runs.variants) / 2
    return [
        NATURAL,
        *(key for key in runs.attacks if sum(variant.after(key) is not None for variant in runs.variants) >= half),
    ]


def _kept(runs: Runs, variant: Variant) -> str:
    counts = dict.fromkeys(f"{run.kept:,}" for run in variant.runs)
    unit = f" {variant.unit}" if len(runs.units) > 1 else ""
    return " / ".join(counts) + f" of {variant.runs[0].size:,}{unit}"


def _dense_level(pruned: Sequence[Variant], key: Attack) -> Estimate | None:
    """The dense network that the pruned ones began with: each seed's once."""
    once = {
        (run.seed, result.value): result
        for variant in pruned
        for run in variant.runs
        for result in run.summary.dense
        if result.key == key
    }
    return estimate(list(once.values()))


def sparsity(runs: Runs) -> Section | None:
    """Accuracy over what is kept, a line a method, a figure for each thing that budgets count."""
    if len(runs.pruned) < 2:
        return None
    figures = [_sparsity(runs, unit) for unit in runs.units]
    lead = "What the methods lose as the budget gets small."
    if len(figures) > 1:
        lead += f" Shares of {', '.join(runs.units)} are not the same thing: each has a figure of its own."
    return Section("sparsity", "Accuracy over sparsity", lead, figures)


def _sparsity(runs: Runs, unit: str) -> Figure:
    pruned = [variant for variant in runs.pruned if variant.unit == unit]
    keys = [key for key in (_tested_under(runs, pruned), NATURAL) if key is not None]
    shares = sorted({float(f"{100 * variant.asked:.3g}") for variant in pruned})
    span = scale.fit([*shares, *(100 * variant.share for variant in pruned)], log=True, reverse=True, room=0.14)
    gap = min((high / low for low, high in pairwise(shares) if high / low > 1.1), default=4.0)
    methods = [method for method in runs.methods if any(variant.method == method for variant in pruned)]
    panels = []
    for key in keys:
        series, values = [], []
        for order, method in enumerate(methods):
            aside = min(gap, 4.0) ** (0.3 * (order / max(1, len(methods) - 1) - 0.5)) if len(methods) > 1 else 1.0
            points = []
            for variant in (one for one in pruned if one.method == method):
                found = variant.after(key)
                if found:
                    text = f"{variant.label}: {found.text} %"
                    place = 100 * variant.share / aside
                    points.append(Point(place, 100 * found.value, 100 * found.low, 100 * found.high, text))
                    values += [100 * found.value, 100 * found.low, 100 * found.high]
            series.append(Series(method, next(v.number for v in pruned if v.method == method), points))
        dense = _dense_level(pruned, key)
        levels = [Level(100 * dense.value, 100 * dense.low, 100 * dense.high, "dense")] if dense else []
        values += [100 * dense.value] if dense else []
        y = Axis("accuracy (%)", scale.fit(values, room=0.08, least=0.0, most=100.0))
        further = "sparser" if unit == "weights" else "smaller"
        x = Axis(f"{unit} kept (%, log scale; {further} to the right)", span, shares)
        name = "without attack" if key == NATURAL else f"under attack: {attack_text(key)}"
        panels.append(Panel(chart.curves(f"Accuracy over sparsity, {name}", series, x, y, levels=levels), name))
    rows = []
    for variant in pruned:
        drops = [_drop(variant, key) for key in keys]
        cells = [cell for key, drop in zip(keys, drops, strict=True) for cell in (_text(variant.after(key)), drop)]
        rows.append([variant.method, variant.budget, str(len(variant.runs)), *cells])
    heads = [text for key in keys for text in (attack_text(key), "change")]
    return Figure(
        "Accuracy over sparsity" if unit == "weights" else f"Accuracy over {unit}",
        f"The smaller the share of {unit} that is kept, the further to the right. The dashed line is the dense network "
        "before pruning, its band the 95 % interval. Methods of one budget stand side by side so that their bars do "
        "not hide each other.",
        panels,
        Table(["method", "kept", "seeds", *heads], rows, note="Change: against the dense network, in points."),
        [Key(method, next(v.number for v in pruned if v.method == method)) for method in methods],
    )


def _tested_under(runs: Runs, variants: Sequence[Variant]) -> Attack | None:
    """The attack that all runs are compared by, or, if none of these was tested by it, that of most of them."""
    tested = {key: sum(variant.after(key) is not None for variant in variants) for key in runs.attacks}
    found = runs.robust if runs.robust and tested[runs.robust] else max(tested, key=lambda k: tested[k], default=None)
    return found if found is not None and tested[found] else None


def _drop(variant: Variant, key: Attack) -> str:
    before, after = variant.before(key), variant.after(key)
    return "–" if before is None or after is None else f"{100 * (after.value - before.value):+.1f}".replace("-", "−")


def curves(runs: Runs) -> Section | None:
    """Accuracy over epsilon, and the distances at which images break."""
    blocks: list[Block] = []
    kinds = dict.fromkeys((curve.attack, curve.norm) for run in runs.all for curve in run.of(Curve))
    for attack, norm in kinds:
        found = [v for v in runs.variants if _curve(v, attack, norm)]
        drawn = runs.panels(found)
        panels, rows = [], []
        span = scale.fit([p.x for v in found for p in _curve(v, attack, norm)], room=0.03, include=[0.0], least=0.0)
        for title, lines in drawn:
            series = [Series(label, number, _curve(variant, attack, norm)) for label, number, variant in lines]
            y = Axis("accuracy (%)", scale.fit([0.0, 100.0], room=0.0))
            x = Axis(f"ε, size of the perturbation ({norm})", span)
            panels.append(Panel(chart.curves(f"Security curve, {attack} {title}", series, x, y), title))
        for variant in found:
            rows += [
                [variant.label, _plain_epsilon(p.x), f"{p.y or 0:.1f} %", _range(p)]
                for p in _curve(variant, attack, norm)
            ]
        figure = Figure(
            f"Security curve under {attack} ({norm})",
            "Accuracy as the attacker may change the image more. A line should fall to zero in the end: one that stays "
            "up at a large ε means that the attack fails, not that the network is robust.",
            panels,
            Table(["network", "ε", "accuracy", "95 % interval"], rows),
            legend(drawn),
        )
        blocks.append(figure)
    blocks += _distances(runs)
    if not blocks:
        return None
    lead = "How accuracy falls as perturbations grow: one ε alone does not describe a network."
    return Section("curves", "Security curves", lead, blocks)


def _plain_epsilon(epsilon: float) -> str:
    """Epsilon beside others, of which some may be no 255ths."""
    return f"{epsilon:.4g}"


def _range(point: Point) -> str:
    return "–" if point.low is None or point.high is None else f"{point.low:.1f} – {point.high:.1f} %"


def legend(drawn: Sequence[tuple[str, Sequence[tuple[str, int, Variant]]]], joined: bool = True) -> list[Key]:
    """The legend of panels."""
    return [Key(label, number, joined) for label, number in dict.fromkeys((e[0], e[1]) for _, es in drawn for e in es)]


def _curve(variant: Variant, attack: str, norm: str) -> list[Point]:
    """The mean curve of the seeds."""
    mine = [curve for run in variant.runs for curve in run.of(Curve) if (curve.attack, curve.norm) == (attack, norm)]
    by_epsilon: dict[float, list[tuple[float, float | None, float | None]]] = {}
    for curve in mine:
        for point in curve.points:
            by_epsilon.setdefault(point.epsilon, []).append((point.value, point.low, point.high))
    points = []
    for epsilon, values in sorted(by_epsilon.items()):
        mean = sum(value for value, _, _ in values) / len(values)
        low, high = values[0][1:] if len(values) == 1 else spread([value for value, _, _ in values])
        text = f"{variant.label}, ε {_plain_epsilon(epsilon)}: {100 * mean:.1f} %"
        points.append(Point(epsilon, 100 * mean, _hundred(low), _hundred(high), text))
    return points


def _hundred(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _distances(runs: Runs) -> list[Block]:
    blocks: list[Block] = []
    for attack, norm in dict.fromkeys((one.attack, one.norm) for run in runs.all for one in run.of(Distances)):
        pools: dict[int, list[float]] = {}
        for place, variant in enumerate(runs.variants):
            records = [one for run in variant.runs for one in run.of(Distances)]
            values = [v for one in records if (one.attack, one.norm) == (attack, norm) for v in one.values]
            if values:
                pools[place] = sorted(math.inf if value is None else value for value in values)
        drawn = runs.panels([runs.variants[place] for place in pools])
        by_label = {runs.variants[place].label: values for place, values in pools.items()}
        reach = [value for values in pools.values() for value in values if math.isfinite(value)]
        span = scale.fit(reach, include=[0.0], room=0.03, least=0.0)
        panels = []
        for title, lines in drawn:
            series = [Series(label, number, _survival(by_label[v.label])) for label, number, v in lines]
            x, y = Axis(f"distance ({norm})", span), Axis("images not yet broken (%)", scale.fit([0.0, 100.0], room=0))
            panels.append(Panel(chart.curves(f"Distances, {attack} {title}", series, x, y, marked=False), title))
        rows = [
            [label, f"{len(values):,}", *(_quantile(values, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9))]
            for label, values in by_label.items()
        ]
        figure = Figure(
            f"How far images are from breaking ({attack}, {norm})",
            "For every image the smallest perturbation that was found to change the answer; the line is the share of "
            "images that need a larger one. Images that were wrong from the start break at 0.",
            panels,
            Table(["network", "images", "10 %", "25 %", "median", "75 %", "90 %"], rows, note="Quantiles of distance."),
            legend(drawn),
        )
        blocks.append(figure)
    return blocks


def _survival(values: Sequence[float]) -> list[Point]:
    count = len(values)
    places = sorted({round(step * (count - 1) / _MOST_QUANTILES) for step in range(_MOST_QUANTILES + 1)})
    known = [(values[place], 100 * (1 - (place + 1) / count)) for place in places if math.isfinite(values[place])]
    return [Point(0.0, 100.0), *(Point(x, y) for x, y in known)]


def _quantile(values: Sequence[float], share: float) -> str:
    value = values[min(len(values) - 1, round(share * (len(values) - 1)))]
    return f"{value:.3g}" if math.isfinite(value) else "never"


def classes(runs: Runs) -> Section | None:
    """Accuracy by class, the worst one named."""
    key = runs.robust or NATURAL
    lead = next((variant for variant in runs.led() if _by_class(variant, key)), None)
    if lead is None:
        return None
    tests = [key] if key == NATURAL else [NATURAL, key]
    count = len(_by_class(lead, key))
    names = [runs.class_name(lead.runs[0], number) for number in range(count)]
    series = [
        Series(attack_text(test), number, _class_points(lead, test, names))
        for number, test in enumerate(tests)
        if len(_by_class(lead, test)) == count
    ]
    axis = Axis("accuracy (%)", scale.fit([0.0, 100.0], room=0.0))
    svg = chart.bars("Accuracy by class", names, series, axis)
    rows = []
    for variant in runs.led():
        found = _by_class(variant, key)
        if found:
            worst = _worst(found)
            mean = sum(right for right, _ in found) / sum(total for _, total in found)
            label = runs.class_name(variant.runs[0], worst)
            rows.append([variant.label, label, _share(found[worst]), _share(_best(found)), per_cent(mean)])
    worst = _worst(_by_class(lead, key))
    detail = Table(
        ["class", *(one.name for one in series), "images"],
        [
            [
                name,
                *(f"{one.points[row].y:.1f} %" if one.points[row].y is not None else "–" for one in series),
                f"{_by_class(lead, key)[row][1]:,}",
            ]
            for row, name in enumerate(names)
        ],
    )
    figure = Figure(
        f"Accuracy by class: {lead.label}",
        f"The worst class is {names[worst]!r} with {_share(_by_class(lead, key)[worst])} ({attack_text(key)}). Thin "
        "lines on the bars are 95 % intervals. Pruning often costs single classes much more than the mean says.",
        [Panel(svg)],
        detail,
        [Key(one.name, one.number, filled=True) for one in series],
    )
    table = Table(
        ["network", "worst class", "its accuracy", "the best class's", "all"], rows, "The worst class everywhere"
    )
    return Section("classes", "Classes", "Who pays for the mean.", [figure, *([table] if len(rows) > 1 else [])])


def _by_class(variant: Variant, key: Attack) -> list[tuple[int, int]]:
    """Right answers and images of each class, over all seeds."""
    found = [result for run in variant.runs for result in run.results if result.key == key and result.totals]
    found = [result for result in found if len(result.totals) == len(result.correct) == len(found[0].totals)]
    return [
        (sum(result.correct[number] for result in found), sum(result.totals[number] for result in found))
        for number in range(len(found[0].totals) if found else 0)
    ]


def _worst(found: Sequence[tuple[int, int]]) -> int:
    return min(range(len(found)), key=lambda number: _ratio(found[number], math.inf))


def _best(found: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return max(found, key=lambda pair: _ratio(pair, -math.inf))


def _ratio(pair: tuple[int, int], without: float) -> float:
    return pair[0] / pair[1] if pair[1] else without


def _share(pair: tuple[int, int]) -> str:
    return per_cent(pair[0] / pair[1] if pair[1] else None)


def _class_points(variant: Variant, key: Attack, names: Sequence[str]) -> list[Point]:
    points = []
    for row, (right, total) in enumerate(_by_class(variant, key)):
        if not total:
            points.append(Point(row, None))
            continue
        low, high = Score("", (right,), (total,)).interval()
        text = f"{names[row]}, {attack_text(key)}: {100 * right / total:.1f} % of {total:,}"
        points.append(Point(row, 100 * right / total, 100 * low, 100 * high, text))
    return points


def parts(runs: Runs) -> Section | None:
    """What each attack of an ensemble did."""
    found = [(variant, run) for variant in runs.led() for run in variant.runs]
    tables = [_parts(variant, run.seed, result) for variant, run in found for result in run.results if result.parts]
    if not tables:
        return None
    lead = (
        "The attacks of an ensemble one after the other: each one gets only the images that those before it left. "
        "Late attacks that still fool many say that the early ones, and PGD alone, are too weak for this network."
    )
    return Section("parts", "Attack by attack", lead, folded(tables, "networks"))


def _parts(variant: Variant, seed: int, result: Accuracy) -> Table:
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
    title = f"{variant.label}, seed {seed}: {attack_text(result.key)}, {per_cent(result.value)} left"
    return Table(["attack", "tried", "fooled", "left", "accuracy so far", "time"], rows, title, note)
