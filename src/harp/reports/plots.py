"""Pictures: where a run's budget went and how its training got there; how methods compare over budgets."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from harp.errors import MissingExtra
from harp.system import files

# Okabe and Ito's palette: told apart by colour-blind eyes and in grey print.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
_COLOURS = (_ORANGE, _BLUE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # without its yellow, lost on white
_TITLE = 120  # letters that a title has room for
_MARKERS = "osD^vP*X<>hpd8H"  # their number and that of the colours share no factor: 105 pairs before one comes again


def draw(
    path: Path,
    title: str,
    layers: Sequence[Mapping[str, Any]],
    stages: Mapping[str, Sequence[Mapping[str, Any]]],
    kind: str = "weights",
) -> None:
    """Draw the layers' rates beside the accuracy over the epochs of all stages, and save it.

    `kind` is what the layers count: weights or channels.
    """
    figure = _figure(title, max(3.2, 0.24 * len(layers) + 1.4))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_layers(left, layers, kind)
    _draw_epochs(right, stages)
    _save(figure, path)


def _figure(title: str, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('pictures need matplotlib: pip install "harp-prune[report]"') from error
    lines = wrap(title, _TITLE)
    figure = Figure(figsize=(11, height + 0.2 * (len(lines) - 1)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=11)
    return figure


def _save(figure: Any, path: Path) -> None:
    with files.atomic(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=130)


def _draw_layers(axes: Any, layers: Sequence[Mapping[str, Any]], kind: str) -> None:
    rates = [100 * layer["kept"] / layer["size"] for layer in layers]
    rows = range(len(layers))
    axes.barh(rows, rates, color=_BLUE, height=0.7)
    channels = kind == "channels"
    if channels:  # seldom below a few per cent, and a width is read as a share of the whole one
        axes.set_xlim(0, 120)
        axes.set_xticks(range(0, 101, 20))
    else:
        axes.set_xscale("log")
        axes.set_xlim(left=min(rates) / 2, right=400)
        axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(labelsize=7)
    axes.set_yticks(rows, [layer["name"].removesuffix(".weight") for layer in layers], fontsize=7)
    axes.invert_yaxis()
    for row, (layer, rate) in enumerate(zip(layers, rates, strict=True)):
        place, of = (rate + 1, f" of {layer['size']:,}") if channels else (rate * 1.08, "")
        axes.text(place, row, f"{layer['kept']:,}{of}", va="center", fontsize=7)
    whole = 100 * sum(layer["kept"] for layer in layers) / sum(layer["size"] for layer in layers)
    axes.axvline(whole, color=_GREY, linestyle="--", linewidth=1)
    what = (
        "channels kept, by the layer that reads them (%)" if channels else "weights kept in each layer (%, log scale)"
    )
    axes.set_xlabel(f"{what}; dashed: whole network, {whole:.3g} %", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_epochs(axes: Any, stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    records = [record for history in stages.values() for record in history]
    for key, colour in (("natural", _GREEN), ("robust", _ORANGE)):
        points = [(i, 100 * record[key]) for i, record in enumerate(records, 1) if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=f"{key} accuracy", linewidth=1.5)
    end = 0
    for name, history in stages.items():
        if history:
            axes.text(end + 0.5 + len(history) / 2, 101, name, ha="center", fontsize=7, color="#555555")
            end += len(history)
            axes.axvline(end + 0.5, color=_GREY, linewidth=0.5)
    axes.set_ylim(0, 100)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("epoch", fontsize=8)
    axes.set_ylabel("accuracy on held-out images (%)", fontsize=8)
    axes.tick_params(labelsize=7)
    if records:
        axes.legend(fontsize=7, frameon=False, loc="best")
    axes.spines[["top", "right"]].set_visible(False)


def draw_study(folder: Path, outcome: Mapping[str, Any]) -> list[Path]:
    """Draw what the runs of a study came to, accuracy over sparsity, as PNG and SVG; needs matplotlib."""
    paths = [folder / f"robust.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        title = f"{outcome['study']}: {outcome['model']} on {outcome['data']}"
        draw_comparison(path, title, outcome["rows"], outcome["attack"], outcome["unit"])
    return paths


def draw_comparison(
    path: Path, title: str, rows: Sequence[Mapping[str, Any]], attack: str, unit: str = "weights"
) -> None:
    """Draw robust and natural accuracy over what the budget counts (`unit`), a line a method, and save it.

    `rows` are those of `harp.experiments.table`: within a budget the best is first; so it is in the legend.
    """
    found = [row for row in rows if row["robust"] is not None]
    methods = list(dict.fromkeys(row["method"] for row in sorted(found, key=lambda row: row["keep"] or 2.0)))
    figure = _figure(title, max(4.4, 0.2 * len(methods) + 1.0))
    for axes, key, name in zip(
        figure.subplots(1, 2), ("robust", "natural"), (f"robust ({attack})", "natural"), strict=True
    ):
        _draw_lines(axes, key, found, methods, unit)
        axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(100.0, axes.get_ylim()[1]))  # few seeds' bars may reach beyond
        axes.set_ylabel(f"accuracy, {name} (%)", fontsize=8)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    _save(figure, path)


def _draw_lines(axes: Any, key: str, rows: Sequence[Mapping[str, Any]], methods: Sequence[str], unit: str) -> None:
    shares = sorted({row["keep"] for row in rows if row["keep"] is not None})
    gap = min((high / low for low, high in pairwise(shares)), default=2.0)
    for number, method in enumerate(methods):
        points = [row for row in rows if row["method"] == method]
        if points[0]["keep"] is None:
            mean, half = 100 * points[0][key], 100 * _drawn(points[0][f"{key}_half"])
            axes.axhline(mean, color=_GREY, linestyle="--", linewidth=1, label=method)
            axes.axhspan(mean - half, mean + half, color=_GREY, alpha=0.15, linewidth=0)
            continue
        # Side by side within two fifths of the way to the next budget: bars at the same place would hide each other.
        aside = gap ** (0.4 * (number / max(1, len(methods) - 1) - 0.5))
        axes.errorbar(
            [100 * row["keep"] / aside for row in points],
            [100 * row[key] for row in points],
            [100 * _drawn(row[f"{key}_half"]) for row in points],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle="-" if number < len(_COLOURS) else "--" if number < 2 * len(_COLOURS) else ":",
            markersize=4,
            linewidth=1.1,
            elinewidth=0.7,
            capsize=2,
            label=method,
        )
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share in shares], [f"{100 * share:.10g}" for share in shares])
    axes.minorticks_off()
    if shares:
        axes.set_xlim(100 * max(shares) * gap**0.5, 100 * min(shares) / gap**0.5)  # reversed: sparse is on the right
    axes.set_xlabel(f"{unit} kept (%, log scale)", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _drawn(half: float | None) -> float:
    return 0.0 if half is None or math.isnan(half) else half
