"""The report's chapters on the network: where the budget went, how it was learned, what the weights look like."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harp.reports.html import chart, scale
from harp.reports.html.accuracy import legend, per_cent
from harp.reports.html.blocks import Block, Figure, Key, Panel, Section, Table, folded
from harp.reports.html.chart import Axis, Border, Point, Series
from harp.reports.html.collect import Run
from harp.reports.html.groups import Runs, Variant
from harp.reports.html.histograms import Histogram
from harp.system.progress import duration

_MOST_ROWS = 120  # of a table of epochs; the data file has all
_BEFORE = 13  # the style of the network before pruning: one that few comparisons get to


def layers(runs: Runs) -> Section:
    """The share and the number of weights or channels that every layer keeps, and what that saves of its work."""
    shapes: dict[tuple[str, ...], list[Variant]] = {}
    for variant in runs.pruned or runs.variants:
        names = [layer.name for layer in variant.runs[0].summary.layers]
        shapes.setdefault((variant.kind, *names), []).append(variant)
    blocks: list[Block] = []
    for (kind, *names), variants in shapes.items():
        blocks += [_layer_figure(runs, _PRUNED[kind == "channels"], names, variants, rates) for rates in (True, False)]
    blocks += _work(runs)
    kinds = {kind for kind, *_ in shapes}
    lead = "A strategy is how a budget is spread over the layers."
    if kinds != {"channels"}:
        lead += " Learned ones usually keep the first and the last layers denser than those with most of the weights."
    if "channels" in kinds:
        lead += (
            " Channels that the same weights give and read are one row, named after the first weight that reads them."
        )
    return Section("layers", "Layers", lead, blocks)


@dataclass(frozen=True)
class _Words:
    """How the figures speak of what was pruned."""

    noun: str
    row: str
    axes: tuple[str, str]  # of rates and of numbers
    titles: tuple[str, str]
    captions: tuple[str, str]
    whole: bool  # whether a layer is shown as a part of the whole one, which is far from nothing


_PRUNED = (
    _Words(
        "weights",
        "layer",
        ("weights kept of each layer", "weights kept in each layer"),
        ("Compression rate per layer", "Preserved weights per layer"),
        (
            "From the input (top) to the output (bottom): the share of its weights that a layer keeps.",
            "The same as numbers of weights: what is left of large layers can still be most of the network.",
        ),
        whole=False,
    ),
    _Words(
        "channels",
        "read by",
        ("channels kept, by the layer that reads them", "width, by the layer that reads it"),
        ("Channels kept", "Widths"),
        (
            "From the input (top) to the output (bottom): the share of the channels that is kept.",
            "The same as numbers of channels: the widths of the smaller network, beside those of the whole one.",
        ),
        whole=True,
    ),
)


def _layer_figure(runs: Runs, words: _Words, names: Sequence[str], variants: Sequence[Variant], rates: bool) -> Figure:
    short = [name.removesuffix(".weight") for name in names]
    drawn = runs.panels(variants)
    values = [value for variant in variants for value in _per_layer(variant, rates)]
    what = words.axes[not rates]
    first = variants[0].runs[0].summary.layers
    before = [Point(row, layer.size) for row, layer in enumerate(first)] if words.whole and not rates else []
    if rates and words.whole:
        span = scale.fit([0.0, 100.0], room=0.0)
    elif rates:
        span = scale.fit(values, log=True, room=0.05, most=100.0)
    else:
        span = scale.fit([*(one.y for one in before), *(max(value, 0.5) for value in values)], log=True, room=0.05)
    panels = []
    for title, lines in drawn:
        series = [Series("before pruning", _BEFORE, before)] if before else []
        for label, number, variant in lines:
            found = _per_layer(variant, rates)
            points = [
                Point(row, value if value > 0 else None, text=f"{label}, {short[row]}: {_layer_text(value, rates)}")
                for row, value in enumerate(found)
            ]
            series.append(Series(label, number, points))
        axis = Axis(f"{what} ({', '.join(['%'] * rates + ['log scale'] * span.log)})", span)
        panels.append(Panel(chart.rows(f"{what} {title}", short, series, axis, joined=True), title))
    empty = any(value == 0 for value in values)
    note = " A layer that keeps nothing has no mark." if empty else ""
    columns = [words.row, words.noun, *(variant.label for variant in variants)]
    rows = [
        [name, f"{first[row].size:,}", *(_layer_text(_per_layer(variant, rates)[row], rates) for variant in variants)]
        for row, name in enumerate(short)
    ]
    table = Table(columns, rows, note=_seeds(variants))
    keys = [*([Key("before pruning", _BEFORE)] if before else []), *legend(drawn)]
    return Figure(words.titles[not rates], f"{words.captions[not rates]}{note}", panels, table, keys)


def _seeds(variants: Sequence[Variant]) -> str:
    return "Means over the seeds." if any(len(variant.runs) > 1 for variant in variants) else ""


def _work(runs: Runs) -> list[Figure]:
    """The multiplications of every layer before and after pruning, a figure an architecture."""
    alike: dict[tuple[tuple[str, int], ...], list[Variant]] = {}
    for variant in runs.pruned or runs.variants:
        costs = [run.summary.cost.layers if run.summary.cost else [] for run in variant.runs]
        shapes = {tuple((layer.name, layer.macs) for layer in layers) for layers in costs}
        if len(shapes) == 1 and costs[0]:
            alike.setdefault(shapes.pop(), []).append(variant)
    return [_work_figure(runs, layers, variants) for layers, variants in alike.items()]


def _work_figure(runs: Runs, layers: Sequence[tuple[str, int]], variants: Sequence[Variant]) -> Figure:
    short = [name.removesuffix(".weight") for name, _ in layers]
    before = [float(macs) for _, macs in layers]
    drawn = runs.panels(variants)
    span = scale.fit([*before, *(value for variant in variants for value in _macs(variant))], log=True, room=0.05)
    panels = []
    for title, lines in drawn:
        shown = [("before pruning", _BEFORE, before), *((label, n, _macs(variant)) for label, n, variant in lines)]
        series = []
        for label, number, values in shown:
            texts = [f"{label}, {name}: {value:,.0f}" for name, value in zip(short, values, strict=True)]
            points = [Point(row, value if value > 0 else None, text=texts[row]) for row, value in enumerate(values)]
            series.append(Series(label, number, points))
        axis = Axis("multiplications of one image (log scale)", span)
        panels.append(Panel(chart.rows(f"multiplications per layer {title}", short, series, axis, joined=True), title))
    rows = [
        [name, *(f"{values[row]:,.0f}" for values in (before, *map(_macs, variants)))] for row, name in enumerate(short)
    ]
    rows.append(["all layers", *(f"{sum(values):,.0f}" for values in (before, *map(_macs, variants)))])
    channels = {variant.kind == "channels" for variant in variants}
    skipped = " Those of pruned weights are saved only by software that skips zeros." if False in channels else ""
    smaller = " Those of channels that were cut out are saved by any software." if True in channels else ""
    return Figure(
        "Multiplications (MACs) per layer",
        f"How often one image is multiplied by a weight of each layer, before and after pruning.{skipped}{smaller}",
        panels,
        Table(["layer", "before pruning", *(variant.label for variant in variants)], rows, note=_seeds(variants)),
        [Key("before pruning", _BEFORE), *legend(drawn)],
    )


def _macs(variant: Variant) -> list[float]:
    """The multiplications that are left of each layer, as the mean of the seeds."""
    costs = [run.summary.cost.layers for run in variant.runs if run.summary.cost]
    return [sum(layer.macs_kept for layer in column) / len(column) for column in zip(*costs, strict=True)]


def _per_layer(variant: Variant, rates: bool) -> list[float]:
    """Per cent or number of the units that each layer keeps, as the mean of the seeds."""
    columns = zip(*(run.summary.layers for run in variant.runs), strict=True)
    return [
        sum(100 * layer.kept / layer.size if rates else layer.kept for layer in column) / len(column)
        for column in columns
    ]


def _layer_text(value: float, rates: bool) -> str:
    return f"{value:.3g} %" if rates else f"{value:,.0f}"


def learning(runs: Runs) -> Section | None:
    """Accuracy, loss, budget loss and γ over the epochs of all stages."""
    found = [(variant, run) for variant in runs.led() for run in variant.runs[:1] if _epochs(run)]
    if not found:
        return None
    figures = [_training(variant, run) for variant, run in found]
    seeds = " Of several seeds the first is shown." if any(len(variant.runs) > 1 for variant in runs.variants) else ""
    lead = f"Pre-training, pruning and fine-tuning, measured on held-out training images after every epoch.{seeds}"
    return Section("learning", "Learning", lead, folded(figures, "networks"))


def _epochs(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    """Stage and record of every epoch."""
    return [(file.stage, record) for file in run.stages.values() if file for record in file.history]


_PANELS = (
    ("accuracy on held-out images (%)", (("natural", "natural"), ("robust", "robust")), 100.0),
    ("training loss", (("loss", "loss"),), 1.0),
    ("budget loss L_HW (share above the budget)", (("budget_loss", "budget loss"),), 1.0),
    ("γ, weight of the budget loss", (("gamma", "γ"),), 1.0),
)
_EXPLAINED = {
    "loss": "The loss is the objective's own (under attack, L_rob).",
    "budget_loss": "The budget loss is how far the learned rates are above the budget, relative to it.",
}


def _training(variant: Variant, run: Run) -> Figure:
    epochs = _epochs(run)
    borders, rings, start = [], [], 0
    for file in run.stages.values():
        if file and file.history:
            end = start + len(file.history)
            borders.append(Border(start + 0.5, end + 0.5, file.stage))
            if file.chosen_epoch:
                rings.append(start + file.chosen_epoch - 1)
            start = end
    span = scale.Scale(0.5, max(1.5, start + 0.5))
    ticks = [tick for tick in span.ticks(7) if tick >= 1 and tick == round(tick)]
    panels: list[Panel] = []
    keys: list[Key] = []
    for label, wanted, factor in _PANELS:
        series: list[Series] = []
        for key, name in wanted:
            values = [_number(record.get(key)) for _, record in epochs]
            if any(value is not None for value in values):
                points = [
                    Point(
                        number,
                        None if value is None else factor * value,
                        text=f"{name}, epoch {number}: {value or 0:.4g}",
                    )
                    for number, value in enumerate(values, 1)
                ]
                style = len(series)
                ring = [place for place in rings if place < len(points)] if key == "robust" else []
                series.append(Series(name, style, points, ring))
        if not series:
            continue
        if factor == 100 and not any(one.ring for one in series):
            series = [Series(one.name, one.number, one.points, rings) for one in series]
        shown = [point.y for one in series for point in one.points]
        limit = 100.0 if factor == 100 else math.inf
        y = Axis(label, scale.fit(shown, room=0.1, least=0.0, most=limit))
        x = Axis("epoch", span, ticks)
        short = sum(point.y is not None for point in series[0].points) <= 30
        svg = chart.curves(f"{label}: {variant.label}", series, x, y, borders=borders, marked=short, height=206)
        panels.append(Panel(svg))
        keys = keys or [Key(one.name, one.number) for one in series]
    present = {key for _, record in epochs for key in record}
    text = " ".join(words for key, words in _EXPLAINED.items() if key in present)
    caption = f"Upright lines are the borders of the stages; a ring marks the epoch whose network was kept. {text}"
    return Figure(f"Training of {variant.label}, seed {run.seed}", caption, panels, _epoch_table(epochs), keys)


def _number(value: object) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good and isinstance(value, (int, float)) else None


def _epoch_table(epochs: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    keys = [key for key in dict.fromkeys(key for _, record in epochs for key in record) if key != "epoch"]
    keys = [key for key in keys if any(_number(record.get(key)) is not None for _, record in epochs)]
    every = math.ceil(len(epochs) / _MOST_ROWS)
    rows = [
        [stage, str(record.get("epoch", number)), *(_cell(record.get(key)) for key in keys)]
        for number, (stage, record) in enumerate(epochs, 1)
        if number % every == 0 or number == len(epochs)
    ]
    note = f"Every {every}th epoch; report.json has all." if every > 1 else ""
    return Table(["stage", "epoch", *(key.replace("_", " ") for key in keys)], rows, note=note)


def _cell(value: object) -> str:
    number = _number(value)
    return "–" if number is None else f"{number:.4g}".replace("-", "−")


def weights(runs: Runs, found: Mapping[str, Sequence[Histogram]]) -> Section | None:
    """The distribution of the kept weights, layer by layer; `found` is by the variant's label."""
    figures: list[Figure] = []
    for variant in runs.led():
        drawn = found.get(variant.label)
        if drawn:
            panels = [
                Panel(
                    chart.histogram(f"weights of {one.layer}", one.counts, one.low, one.high),
                    f"{chart.shorten(one.layer.removesuffix('.weight'), 20)} · {one.kept:,}",
                )
                for one in drawn
            ]
            rows = [[one.layer, f"{one.kept:,}", f"{one.high:.3g}", f"{one.deviation:.3g}"] for one in drawn]
            figures.append(
                Figure(
                    f"Kept weights of {variant.label}",
                    "Histograms of the values of the weights that are kept, a drawing a layer with its name and their "
                    "number; each has an axis of its own from −max to max. A gap at zero means that small weights were "
                    "the ones to go.",
                    panels,
                    Table(["layer", "kept", "largest", "standard deviation"], rows),
                    small=True,
                )
            )
    if not figures:
        return None
    seeds = " (the first seed)" if any(len(variant.runs) > 1 for variant in runs.variants) else ""
    return Section(
        "weights", "Weights", f"What the weights that are left look like{seeds}.", folded(figures, "networks")
    )


def cost(runs: Runs) -> Section:
    """Operations, parameters, size; epochs, time and energy."""
    blocks: list[Block] = []
    costs = [(variant, [run.summary.cost for run in variant.runs if run.summary.cost]) for variant in runs.led()]
    known = [(variant, found[0]) for variant, found in costs if found]
    if known:
        rows = [
            [
                variant.label,
                *_pair(found.macs, found.macs_kept, count_text),
                *_pair(found.parameters, found.parameters_kept, count_text),
                *_pair(found.bytes_dense, found.bytes_sparse, bytes_text),
            ]
            for variant, found in known
        ]
        columns = ["network", "MACs", "kept", "", "parameters", "kept", "", "bytes", "kept", ""]
        note = "MACs: multiplications of one image with weights that are not zero; about twice as many FLOPs."
        kinds = {variant.kind for variant, _ in known if not variant.dense}
        if "weights" in kinds:
            note += (
                " Where single weights were pruned, the bytes are an estimate of values with their positions, and time "
                "is saved only by software that skips zeros."
            )
        if "channels" in kinds:
            note += (
                " Where channels were pruned, they are cut out: tensors are smaller, and any software saves the work."
            )
        blocks.append(Table(columns, rows, "Operations, parameters, size", note))
    blocks.append(_times(runs))
    return Section("cost", "Cost", "What the network costs to run and to store, and what making it took.", blocks)


def _pair(whole: int | None, part: int | None, text: Any) -> list[str]:
    share = per_cent(part / whole) if whole and part is not None else "–"
    return ["–" if whole is None else text(whole), "–" if part is None else text(part), share]


def count_text(count: int) -> str:
    """A large number in short."""
    for size, name in ((10**9, " G"), (10**6, " M"), (10**4, " k")):
        if count >= size:
            unit = size if size != 10**4 else 1000
            return f"{count / unit:.3g}{name}"
    return f"{count:,}"


def bytes_text(count: int) -> str:
    """A size of a file."""
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count} B"


def _times(runs: Runs) -> Table:
    rows, once, measured = [], dict[str, Any](), set[str]()
    for variant in runs.variants:
        for run in variant.runs:
            files = [file for file in run.stages.values() if file]
            once |= {name: file for name, file in run.stages.items() if file}
            energy = [file.energy for file in files if file.energy]
            measured |= {one.by for one in energy if one.by}
            seconds = [file.seconds for file in files if file.seconds is not None]
            rows.append(
                [
                    variant.label,
                    str(run.seed),
                    " + ".join(f"{file.epochs} {file.stage}" for file in files) or "–",
                    duration(sum(seconds)) if seconds else "–",
                    _energy([one.kwh for one in energy]),
                    _carbon([one.co2_g for one in energy if one.co2_g is not None]),
                ]
            )
    total = sum(file.seconds or 0.0 for file in once.values())
    spent = [file.energy for file in once.values() if file.energy]
    if len(runs.all) > 1:
        carbon = [one.co2_g for one in spent if one.co2_g is not None]
        rows.append(["all together", "", "", duration(total), _energy([one.kwh for one in spent]), _carbon(carbon)])
    note = "Stages that runs share are in the time of each, and once in the sum." if len(runs.all) > 1 else ""
    note += f" Energy measured by {', '.join(sorted(measured))}." if measured else ""
    return Table(["network", "seed", "epochs", "time", "energy", "CO₂"], rows, "Training", note.strip())


def _energy(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{sum(values):.3g} kWh" if sum(values) >= 0.1 else f"{1000 * sum(values):.3g} Wh"


def _carbon(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{sum(values) / 1000:.3g} kg" if sum(values) >= 1000 else f"{sum(values):.3g} g"
