"""How the kept weights of a run's layers are distributed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from harp.pruning import masks
from harp.reports.html.collect import Run
from harp.system.tensors import load_tensors

_BINS, _FEW_BINS, _MANY = 32, 16, 200  # bins of a histogram: fewer where there are not many weights


@dataclass(frozen=True)
class Histogram:
    """How the kept weights of a layer are distributed: counts in equal steps from low to high."""

    layer: str
    kept: int
    low: float
    high: float
    counts: list[int]
    deviation: float


def histograms(run: Run) -> list[Histogram]:
    """The distribution of the kept weights of every layer; none if the run has no file of weights."""
    path = run.folder / "model.safetensors"
    if not path.is_file():
        return []
    weights, _ = load_tensors(path)
    mask_path = run.folder / "masks.safetensors"
    kept = masks.load(mask_path) if mask_path.is_file() else {}
    found = []
    for name in _layer_names(run, weights):
        weight = weights[name].detach().float()
        chosen = kept.get(name)
        values = weight[chosen] if chosen is not None and chosen.shape == weight.shape else weight[weight != 0]
        values = values[values.isfinite()]
        if not len(values):
            found.append(Histogram(name, 0, -1.0, 1.0, [0] * _FEW_BINS, 0.0))
            continue
        end = float(values.abs().max()) or 1.0
        counts = values.histc(_BINS if len(values) >= _MANY else _FEW_BINS, -end, end).int().tolist()
        spread = float(values.std()) if len(values) > 1 else 0.0
        found.append(Histogram(name, len(values), -end, end, counts, spread if math.isfinite(spread) else 0.0))
    return found


def _layer_names(run: Run, weights: Mapping[str, Tensor]) -> list[str]:
    """The layers whose weights are shown: all that channels run through, or those that single weights are pruned of."""
    costs = run.summary.cost.layers if run.summary.cost else []
    layers = costs if run.kind == "channels" and costs else run.summary.layers
    return [layer.name for layer in layers if layer.name in weights]
