"""The report's chapters on the network: where the budget went, what the weights look like, training and cost."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harp.experiments.records import StageFile
from harp.pruning import masks
from harp.reports.html.accuracy import per_cent
from harp.reports.html.blocks import Block, Figure, Section, Table, figure, folded, section
from harp.reports.html.collect import Run
from harp.reports.html.groups import Runs, Variant
from harp.reports.plots import Chart, Series
from harp.reports.tables import bytes_text, count_text
from harp.system.progress import duration
from harp.system.tensors import load_tensors

_EPOCHS = 120  # rows of a table of epochs; the data file has all
_BEFORE = 13  # the style of the network before pruning, which few comparisons use otherwise
_BINS, _FEW_BINS, _MANY = 32, 16, 200  # bins of a histogram, fewer if there are not many weights


def layers(runs: Runs) -> Section | None:
    """The share and the number of weights or channels that every layer keeps, and how many multiplications are left."""
    shapes: dict[tuple[str, ...], list[Variant]] = {}
    for variant in runs.pruned or runs.variants:
        names = [layer.name for layer in variant.runs[0].summary.layers]
        shapes.setdefault((variant.kind, *names), []).append(variant)
    figures = []
    for (kind, *names), variants in shapes.items():
        channels = kind == "channels"
        sizes = [float(layer.size) for layer in variants[0].runs[0].summary.layers]
        first = ("read by" if channels else "layer", kind, sizes)
        axis = (
            "channels kept, by the layer that reads them (%)"
            if channels
            else "weights kept of each layer (%, log scale)"
        )
        figures.append(_layer_figure(runs, f"{kind} rates", axis, variants, names, _rates, first))
        axis = f"{'width, by the layer that reads it' if channels else 'weights kept in each layer'} (log scale)"
        figures.append(_layer_figure(runs, f"{kind} numbers", axis, variants, names, _numbers, first, before=channels))
    kinds = {kind for kind, *_ in shapes}
    more = ""
    if kinds != {"channels"}:
        more += " Learned ones usually keep the first and the last layers denser than those with most of the weights."
    if "channels" in kinds:
        more += " Channels that the same weights write and read are one row, named after the first that reads them."
    return section("layers", [*figures, *_multiplications(runs)], kinds=more)


def _layer_figure(
    runs: Runs,
    name: str,
    axis: str,
    variants: Sequence[Variant],
    names: Sequence[str],
    values: Callable[[Variant], list[float]],
    first: tuple[str, str, list[float]],
    before: bool = False,
    **more: str,
) -> Figure:
    """A row per layer, a line per network.

    `first` is the first two columns of the table: their titles and the numbers of the network before pruning, which
    are drawn too if `before`.
    """
    short, (row_title, column_title, sizes) = [name.removesuffix(".weight") for name in names], first
    unit, log = " %" if values is _rates else "", "log scale" in axis
    drawn = [Series("before pruning", _BEFORE, range(len(names)), sizes)] if before else []
    chart = Chart("", axis, "", drawn, short, unit=unit, log=log, whole=not log)
    columns = [values(variant) for variant in variants]
    rows = [
        [layer, f"{sizes[row]:,.0f}", *(f"{c[row]:.3g} %" if unit else f"{c[row]:,.0f}" for c in columns)]
        for row, layer in enumerate(short)
    ]
    if values is _macs:
        rows.append(["all layers", *(f"{sum(column):,.0f}" for column in (sizes, *columns))])
    note = "Means over the seeds." if any(len(variant.runs) > 1 for variant in variants) else ""
    return figure(
        name,
        runs.charts(variants, lambda variant: (range(len(names)), values(variant), (), ()), chart),
        Table([row_title, column_title, *(variant.label for variant in variants)], rows, note=note),
        empty=" A layer that keeps nothing has no mark." if any(0 in column for column in columns) else "",
        **more,
    )


def _means(seeds: Iterable[Iterable[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*seeds, strict=True)]


def _rates(variant: Variant) -> list[float]:
    """The percentage that each layer keeps, as the mean of the seeds."""
    return _means((100 * layer.kept / layer.size for layer in run.summary.layers) for run in variant.runs)


def _numbers(variant: Variant) -> list[float]:
    return _means((layer.kept for layer in run.summary.layers) for run in variant.runs)


def _macs(variant: Variant) -> list[float]:
    costs = [run.summary.cost for run in variant.runs if run.summary.cost]
    return _means((layer.macs_kept for layer in cost.layers) for cost in costs)


def _multiplications(runs: Runs) -> list[Figure]:
    """The multiplications of every layer before and after pruning, one figure per architecture."""
    alike: dict[tuple[tuple[str, int], ...], list[Variant]] = {}
    for variant in runs.pruned or runs.variants:
        costs = [run.summary.cost.layers if run.summary.cost else [] for run in variant.runs]
        shapes = {tuple((layer.name, layer.macs) for layer in layers) for layers in costs}
        if len(shapes) == 1 and costs[0]:
            alike.setdefault(shapes.pop(), []).append(variant)
    figures = []
    for layers, variants in alike.items():
        kinds = {variant.kind for variant in variants}
        saved = " Only software that skips zeros saves those of pruned weights." * ("weights" in kinds)
        saved += " Any software saves those of channels that were cut out." * ("channels" in kinds)
        names, first = [name for name, _ in layers], ("layer", "before pruning", [float(macs) for _, macs in layers])
        axis = "multiplications of one image (log scale)"
        figures.append(_layer_figure(runs, "macs", axis, variants, names, _macs, first, before=True, saved=saved))
    return figures


def learning(runs: Runs) -> Section | None:
    """Accuracy, loss, budget loss and γ over the epochs of all stages."""
    figures = [_training(variant, variant.runs[0]) for variant in runs.led() if _epochs(variant.runs[0])]
    seeds = " Of several seeds the first is shown." if runs.seeds else ""
    return section("learning", folded(figures, "networks"), seeds=seeds)


def _epochs(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    """Stage and record of every epoch."""
    return [(file.stage, record) for file in run.stages.values() if file for record in file.history]


_TRAINING_CHARTS = (
    ("accuracy on held-out images (%)", ("natural", "robust"), 100.0),
    ("training loss", ("loss",), 1.0),
    ("budget loss L_HW (share above the budget)", ("budget_loss",), 1.0),
    ("γ, weight of the budget loss", ("gamma",), 1.0),
)
_NAMES = {"natural": "natural", "robust": "robust", "loss": "loss", "budget_loss": "budget loss", "gamma": "γ"}


def _training(variant: Variant, run: Run) -> Figure:
    epochs = _epochs(run)
    stages, chosen, start = [], [], 0
    for file in run.stages.values():
        if file and file.history:
            stages.append((file.stage, len(file.history)))
            chosen += [start + file.chosen_epoch - 1] if file.chosen_epoch else []
            start += len(file.history)
    charts = []
    for label, keys, factor in _TRAINING_CHARTS:
        columns = {key: [_number(record.get(key)) for _, record in epochs] for key in keys}
        columns = {key: values for key, values in columns.items() if any(value is not None for value in values)}
        series = [
            Series(
                _NAMES[key],
                list(_NAMES).index(key),
                range(1, start + 1),
                [None if value is None else factor * value for value in values],
                rings=chosen if factor == 100 and key == list(columns)[-1] else (),
            )
            for key, values in columns.items()
        ]
        if series:
            unit = " %" if factor == 100 else ""
            charts.append(Chart("", "epoch", label, series, unit=unit, marked=start <= 30, stages=stages))
    known = {key for _, record in epochs for key in record}
    losses = ""
    if "loss" in known:
        losses += " The loss is that of the objective (under attack, L_rob)."
    if "budget_loss" in known:
        losses += " The budget loss is how far the learned rates are above the budget, relative to it."
    values = {"network": variant.label, "seed": run.seed, "losses": losses}
    return figure("training", charts, _epoch_table(epochs), **values)


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
    """The distribution of the kept weights, layer by layer; `measured` is by the label of the variant."""
    figures = [_weights(variant, measured[variant.label]) for variant in runs.led() if measured.get(variant.label)]
    return section("weights", folded(figures, "networks"), seeds=" (the first seed)" if runs.seeds else "")


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
    measured = sorted({file.energy.by for file in stages.values() if file.energy and file.energy.by})
    note += f" Energy measured by {', '.join(measured)}." if measured else ""
    return Table(["network", "seed", "epochs", "time", "energy", "CO₂"], rows, "Training", note.strip())


def _spent(stages: Sequence[StageFile]) -> list[str]:
    """Time, energy and CO₂ of some stages."""
    seconds = [stage.seconds for stage in stages if stage.seconds is not None]
    kwh = [stage.energy.kwh for stage in stages if stage.energy]
    grams = [stage.energy.co2_g for stage in stages if stage.energy and stage.energy.co2_g is not None]
    energy = f"{sum(kwh):.3g} kWh" if sum(kwh) >= 0.1 else f"{1000 * sum(kwh):.3g} Wh"
    carbon = f"{sum(grams) / 1000:.3g} kg" if sum(grams) >= 1000 else f"{sum(grams):.3g} g"
    return [duration(sum(seconds)) if seconds else "–", energy if kwh else "–", carbon if grams else "–"]
