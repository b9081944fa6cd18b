"""The report's chapters on the network: where the budget went, what the weights look like, training and cost."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harp.experiments.records import StageFile
from harp.pruning import masks
from harp.reports import plots
from harp.reports.html.accuracy import per_cent
from harp.reports.html.blocks import Block, Figure, Fold, Section, Table, figure, folded, section
from harp.reports.html.collect import Run
from harp.reports.html.groups import Runs, Variant
from harp.reports.plots import Chart, Series
from harp.reports.tables import bytes_text, count_text
from harp.system.progress import duration
from harp.system.tensors import load_tensors

_EPOCHS = 120  # rows of a table of epochs; the data file has all
_BINS, _FEW_BINS, _MANY = 32, 16, 200  # bins of a histogram, fewer if there are not many weights


def layers(runs: Runs) -> Section | None:
    """What every layer keeps, at the budget of the network to show first; other budgets on demand."""
    shapes: dict[tuple[str, str, tuple[str, ...]], list[Variant]] = {}
    for variant in sorted(runs.pruned or runs.variants, key=lambda variant: variant.budget != runs.lead.budget):
        names = tuple(layer.name for layer in variant.runs[0].summary.layers)
        shapes.setdefault((variant.kind, variant.budget, names), []).append(variant)
    figures = [_layers(kind, budget, variants) for (kind, budget, _), variants in shapes.items()]
    kinds = {kind for kind, *_ in shapes}
    more = ""
    if kinds != {"channels"}:
        more += " Learned ones usually keep the first and the last layers denser than those with most of the weights."
    if "channels" in kinds:
        more += " Channels that the same weights write and read are one row, named after the first that reads them."
    return section("layers", [*folded(figures, "budgets"), *_multiplications(runs)], kinds=more)


def _layers(kind: str, budget: str, variants: Sequence[Variant]) -> Figure:
    """The layers of some networks: bars of a single one, else a point for each."""
    rows = [layer.model_dump() for layer in variants[0].runs[0].summary.layers]
    chart = plots.layers(rows, kind)
    if len(variants) > 1 or len(variants[0].runs) > 1:
        places = range(len(rows))
        series = [Series(one.method, one.style, places, _rates(one)) for one in variants]
        chart = replace(chart, series=series, kind="marks", levels=[], x=chart.x.split(";")[0])
    counts = [_numbers(variant) for variant in variants]
    rates = [_rates(variant) for variant in variants]
    cells = [
        [
            name,
            f"{layer['size']:,}",
            *(f"{n[row]:,.0f} ({share[row]:.3g} %)" for n, share in zip(counts, rates, strict=True)),
        ]
        for row, (name, layer) in enumerate(zip(chart.rows, rows, strict=True))
    ]
    note = "Means over the seeds." if any(len(variant.runs) > 1 for variant in variants) else ""
    empty = " A layer that keeps nothing has no mark." if any(0 in column for column in counts) else ""
    first = "read by" if kind == "channels" else "layer"
    table = Table([first, kind, *(variant.label for variant in variants)], cells, note=note)
    return figure(f"{kind} rates", [chart], table, empty=empty, budget=budget)


def _means(seeds: Iterable[Iterable[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*seeds, strict=True)]


def _rates(variant: Variant) -> list[float]:
    """The percentage that each layer keeps, as the mean of the seeds."""
    return _means((100 * layer.kept / layer.size for layer in run.summary.layers) for run in variant.runs)


def _numbers(variant: Variant) -> list[float]:
    return _means((layer.kept for layer in run.summary.layers) for run in variant.runs)


def _multiplications(runs: Runs) -> list[Block]:
    """The multiplications of every layer before and after pruning, one table per architecture."""
    alike: dict[tuple[tuple[str, int], ...], list[Variant]] = {}
    for variant in runs.pruned or runs.variants:
        costs = [run.summary.cost.layers if run.summary.cost else [] for run in variant.runs]
        shapes = {tuple((layer.name, layer.macs) for layer in layers) for layers in costs}
        if len(shapes) == 1 and costs[0]:
            alike.setdefault(shapes.pop(), []).append(variant)
    tables: list[Block] = []
    for layers, variants in alike.items():
        kinds = {variant.kind for variant in variants}
        note = "How often one image is multiplied by a weight of each layer."
        note += " Only software that skips zeros saves those of pruned weights." * ("weights" in kinds)
        note += " Any software saves those of channels that were cut out." * ("channels" in kinds)
        columns = [[float(macs) for _, macs in layers], *map(_macs, variants)]
        rows = [[n.removesuffix(".weight"), *(f"{c[row]:,.0f}" for c in columns)] for row, (n, _) in enumerate(layers)]
        rows.append(["all layers", *(f"{sum(column):,.0f}" for column in columns)])
        titles = ["layer", "before pruning", *(variant.label for variant in variants)]
        table = Table(titles, rows, "Multiplications (MACs) per layer", note)
        tables.append(Fold(table.title, [table]))
    return tables


def _macs(variant: Variant) -> list[float]:
    costs = [run.summary.cost for run in variant.runs if run.summary.cost]
    return _means((layer.macs_kept for layer in cost.layers) for cost in costs)


def learning(runs: Runs) -> Section | None:
    """Accuracy and loss over the epochs of all stages; the table has the rest."""
    figures = [_training(variant, variant.runs[0]) for variant in runs.led() if _epochs(variant.runs[0])]
    seeds = " Of several seeds the first is shown." if runs.seeds else ""
    return section("learning", folded(figures, "networks"), seeds=seeds)


def _epochs(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    """Stage and record of every epoch."""
    return [(file.stage, record) for file in run.stages.values() if file for record in file.history]


def _training(variant: Variant, run: Run) -> Figure:
    epochs = _epochs(run)
    stages, chosen, start = [], [], 0
    for file in run.stages.values():
        if file and file.history:
            stages.append((file.stage, file.history))
            chosen += [start + file.chosen_epoch - 1] if file.chosen_epoch else []
            start += len(file.history)
    charts = [plots.training(stages, chosen)]
    losses = [_number(record.get("loss")) for _, record in epochs]
    if any(loss is not None for loss in losses):
        loss = Series("loss", 2, range(1, start + 1), losses)
        charts.append(replace(charts[0], y="training loss", series=[loss], unit="", whole=False))
    values = {"network": variant.label, "seed": run.seed}
    return figure("training", [chart for chart in charts if chart.series], _epoch_table(epochs), **values)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _epoch_table(epochs: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    keys = [key for key in dict.fromkeys(key for _, record in epochs for key in record) if key != "epoch"]
    keys = [key for key in keys if any(_number(record.get(key)) is not None for _, record in epochs)]
    every = math.ceil(len(epochs) / _EPOCHS)
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


@dataclass(frozen=True)
class Histogram:
    """The distribution of the kept weights of a layer: counts in equal steps from low to high."""

    layer: str
    kept: int
    low: float
    high: float
    counts: list[int]
    deviation: float


def histograms(run: Run) -> list[Histogram]:
    """The distributions of the kept weights of every layer; none if the run has no file of weights."""
    path, mask_path = run.folder / "model.safetensors", run.folder / "masks.safetensors"
    if not path.is_file():
        return []
    weights, _ = load_tensors(path)
    kept = masks.load(mask_path) if mask_path.is_file() else {}
    costs = run.summary.cost.layers if run.summary.cost else []  # of channels, all layers that have weights
    names = [layer.name for layer in (costs if run.kind == "channels" and costs else run.summary.layers)]
    distributions = []
    for name in (name for name in names if name in weights):
        weight, mask = weights[name].detach().float(), kept.get(name)
        values = weight[mask if mask is not None and mask.shape == weight.shape else weight != 0]
        values = values[values.isfinite()]
        end = float(values.abs().max()) or 1.0 if len(values) else 1.0
        counts = values.histc(_BINS if len(values) >= _MANY else _FEW_BINS, -end, end).int().tolist()
        spread = float(values.std()) if len(values) > 1 else 0.0
        distributions.append(Histogram(name, len(values), -end, end, counts, spread if math.isfinite(spread) else 0.0))
    return distributions


def weights(runs: Runs, measured: Mapping[str, Sequence[Histogram]]) -> Section | None:
    """The distribution of the kept weights of the network to show first; `measured` is by the label of the variant."""
    figures = [_weights(variant, measured[variant.label]) for variant in runs.led() if measured.get(variant.label)]
    return section("weights", figures[:1], seeds=" (the first seed)" if runs.seeds else "")


def _weights(variant: Variant, measured: Sequence[Histogram]) -> Figure:
    series = []
    for one in measured:
        steps = len(one.counts)
        centres = [(2 * step + 1) / steps - 1 for step in range(steps)]
        series.append(Series(f"{one.layer}: {one.kept:,} weights up to ±{one.high:.3g}", 1, centres, one.counts))
    names = [one.layer.removesuffix(".weight") for one in measured]
    rows = [[one.layer, f"{one.kept:,}", f"{one.high:.3g}", f"{one.deviation:.3g}"] for one in measured]
    chart = Chart("", "weight, relative to the largest of its layer", "", series, names, "histograms")
    table = Table(["layer", "kept", "largest", "standard deviation"], rows)
    return figure("weights", [chart], table, network=variant.label)


def cost(runs: Runs) -> Section | None:
    """Operations, parameters, size; epochs, time and energy."""
    blocks: list[Block] = [_times(runs)]
    costs = [(v, next((run.summary.cost for run in v.runs if run.summary.cost), None)) for v in runs.led()]
    rows = [
        [
            variant.label,
            *_pair(cost.macs, cost.macs_kept, count_text),
            *_pair(cost.parameters, cost.parameters_kept, count_text),
            *_pair(cost.bytes_dense, cost.bytes_sparse, bytes_text),
        ]
        for variant, cost in costs
        if cost
    ]
    if rows:
        columns = ["network", "MACs", "kept", "", "parameters", "kept", "", "bytes", "kept", ""]
        note = "MACs: multiplications of one image with weights that are not zero; about twice as many FLOPs."
        kinds = {variant.kind for variant, cost in costs if cost and not variant.dense}
        if "weights" in kinds:
            note += (
                " If single weights were pruned, the bytes are an estimate for values with their positions, and only "
                "software that skips zeros saves time."
            )
        if "channels" in kinds:
            note += " Pruned channels are cut out: tensors are smaller, and any software saves time."
        blocks.insert(0, Table(columns, rows, "Operations, parameters, size", note))
    return section("cost", blocks)


def _pair(whole: int | None, part: int | None, text: Callable[[int], str]) -> list[str]:
    share = per_cent(part / whole) if whole and part is not None else "–"
    return ["–" if whole is None else text(whole), "–" if part is None else text(part), share]


def _times(runs: Runs) -> Table:
    rows, stages = [], dict[str, StageFile]()
    for variant in runs.variants:
        for run in variant.runs:
            own = {name: file for name, file in run.stages.items() if file}
            epochs = " + ".join(f"{file.epochs} {file.stage}" for file in own.values()) or "–"
            rows.append([variant.label, str(run.seed), epochs, *_spent(list(own.values()))])
            stages |= own
    note = ""
    if len(runs.all) > 1:
        rows.append(["all together", "", "", *_spent(list(stages.values()))])
        note = "Stages that runs share are in the time of each, and once in the sum."
    sources = dict.fromkeys(_source(file.energy.by) for file in stages.values() if file.energy and file.energy.by)
    note += f" Energy: {'; '.join(sources)}." if sources else ""
    return Table(["network", "seed", "epochs", "time", "energy", "CO₂"], rows, "Training", note.strip())


def _source(by: str) -> str:
    """How an energy was found, without the hours of a stage, which its row has: then it is said once."""
    return re.sub(r"x [\d.e+-]+ h x", "x hours x", by)


def _spent(stages: Sequence[StageFile]) -> list[str]:
    """Time, energy and CO₂ of some stages."""
    seconds = [stage.seconds for stage in stages if stage.seconds is not None]
    kwh = [stage.energy.kwh for stage in stages if stage.energy]
    grams = [stage.energy.co2_g for stage in stages if stage.energy and stage.energy.co2_g is not None]
    energy = f"{sum(kwh):.3g} kWh" if sum(kwh) >= 0.1 else f"{1000 * sum(kwh):.3g} Wh"
    carbon = f"{sum(grams) / 1000:.3g} kg" if sum(grams) >= 1000 else f"{sum(grams):.3g} g"
    return [duration(sum(seconds)) if seconds else "–", energy if kwh else "–", carbon if grams else "–"]
