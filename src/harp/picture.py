"""Pictures of a run: where the budget went, and how the training got there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harp import files
from harp.errors import MissingExtra

# Okabe and Ito's palette: told apart by colour-blind eyes and in grey print.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#999999"


def draw(
    path: Path, title: str, layers: Sequence[Mapping[str, Any]], stages: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Draw the layers' rates beside the accuracy over the epochs of all stages, and save it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('pictures need matplotlib: pip install "harp-prune[report]"') from error
    figure = Figure(figsize=(11, max(3.2, 0.24 * len(layers) + 1.4)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_layers(left, layers)
    _draw_epochs(right, stages)
    with files.atomic(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=130)


def _draw_layers(axes: Any, layers: Sequence[Mapping[str, Any]]) -> None:
    rates = [100 * layer["kept"] / layer["size"] for layer in layers]
    rows = range(len(layers))
    axes.barh(rows, rates, color=_BLUE, height=0.7)
    axes.set_xscale("log")
    axes.set_xlim(left=min(rates) / 2, right=400)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(labelsize=7)
    axes.set_yticks(rows, [layer["name"].removesuffix(".weight") for layer in layers], fontsize=7)
    axes.invert_yaxis()
    for row, (layer, rate) in enumerate(zip(layers, rates, strict=True)):
        axes.text(rate * 1.08, row, f"{layer['kept']:,}", va="center", fontsize=7)
    whole = 100 * sum(layer["kept"] for layer in layers) / sum(layer["size"] for layer in layers)
    axes.axvline(whole, color=_GREY, linestyle="--", linewidth=1)
    axes.set_xlabel(f"weights kept in each layer (%, log scale); dashed: whole network, {whole:.3g} %", fontsize=8)
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
