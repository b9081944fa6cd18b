"""Units of every kind, and what an allocation of them promises."""

from collections.abc import Callable
from typing import Any

from torch import nn

from harp.pruning.channels import Channels
from harp.pruning.units import Units, Weights
from support import cases


def by_macs(model: nn.Module) -> Units:
    return Weights(model, budget="macs", example=cases.batch()[0])


def channels(model: nn.Module, **options: Any) -> Units:
    return Channels(model, cases.batch()[0], **options)


KINDS: dict[str, tuple[str, Callable[[nn.Module], Units]]] = {
    "macs": ("residual", by_macs),
    "filters": ("conv", cases.Filters),
    "channels": ("residual", channels),
    "channels in fours": ("conv", lambda model: channels(model, multiple=4)),
    "memory of channels": ("conv", lambda model: channels(model, budget="memory")),
}


def make(kind: str, seed: int = 0) -> Any:
    case, units = KINDS[kind]
    return units(cases.build(case, seed))


def following(units: Any, layer: int, count: int) -> int | None:
    """The next count that a layer may have, by trying all."""
    step, size = units.steps[layer], units.sizes[layer]
    allowed = [c for c in range(count + 1, units.upper[layer] + 1) if c % step == 0 or c == size]
    return allowed[0] if allowed else None


def check(units: Any, counts: list[int], total: int) -> None:
    """Whether an answer is all that is promised."""
    assert units.spend(counts) <= total
    for layer, count in enumerate(counts):
        assert units.lower[layer] <= count <= units.upper[layer]
        assert count % units.steps[layer] == 0 or count == units.sizes[layer]
        more = following(units, layer, count)
        if more is not None:
            assert units.spend([more if i == layer else c for i, c in enumerate(counts)]) > total, "not maximal"
