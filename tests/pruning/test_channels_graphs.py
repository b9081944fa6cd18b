"""Channels of random small networks: the cut network always has the outputs of the masked one."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.errors import ModelError
from harp.pruning.channels import Channels
from support.slimmed import check

CHANNELS = st.sampled_from([2, 4, 6, 8])


class Graph(nn.Module):
    """Steps that work on a list of feature maps; each is a name, a choice of maps and a number of channels."""

    def __init__(self, steps: list[tuple[str, int, int, int]], flat: bool) -> None:
        super().__init__()
        self.steps, self.flat = steps, flat
        self.layers = nn.ModuleDict({"stem": nn.Conv2d(3, 6, 3, padding=1)})
        maps = [(6, 8)]  # channels and size
        self.plan: list[tuple[str, int, int, str]] = []
        for number, (kind, first, second, width) in enumerate(steps):
            name, one, other = f"{kind}{number}", first % len(maps), second % len(maps)
            channels, size = maps[one]
            layer, shape = self.build(kind, channels, size, maps[other], width)
            if shape is None:
                continue
            if isinstance(layer, nn.Module):
                same = [key for key, other in self.layers.items() if repr(other) == repr(layer)]
                if kind == "shared" and same:
                    name = same[0]
                else:
                    self.layers[name] = layer
            self.plan.append((kind, one, other, name))
            maps.append(shape)
        channels, size = maps[-1]
        self.head = nn.Linear(channels * size * size if flat else channels, 4)

    def build(self, kind: str, channels: int, size: int, other: tuple[int, int], width: int) -> tuple[Any, Any]:
        """A layer for a step, and the shape of what it gives; no shape if it doesn't fit."""
        if kind in ("conv", "shared"):
            out = channels if kind == "shared" else width
            return nn.Conv2d(channels, out, 3, padding=1), (out, size)
        if kind == "pointwise":
            return nn.Conv2d(channels, width, 1, bias=False), (width, size)
        if kind == "dilated":
            return nn.Conv2d(channels, width, 3, padding=2, dilation=2), (width, size)
        if kind == "strided":
            return (nn.Conv2d(channels, width, 2, 2), (width, size // 2)) if size > 2 else (None, None)
        if kind == "depthwise":
            return nn.Conv2d(channels, 2 * channels if width == 2 else channels, 3, padding=1, groups=channels), (
                2 * channels if width == 2 else channels,
                size,
            )
        if kind == "grouped":
            return (
                (nn.Conv2d(channels, 2 * width, 3, padding=1, groups=2), (2 * width, size))
                if channels % 2 == 0
                else (None, None)
            )
        if kind == "up":
            return nn.ConvTranspose2d(channels, width, 2, 2), (width, size * 2)
        if kind == "norm":
            return nn.BatchNorm2d(channels), (channels, size)
        if kind == "group norm":
            return nn.GroupNorm(1, channels), (channels, size)
        if kind == "gate":
            return nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, width, 1), nn.SiLU(), nn.Conv2d(width, channels, 1)
            ), (
                channels,
                size,
            )
        if kind == "add":
            return None, (channels, size) if other == (channels, size) else None
        if kind == "cat":
            return None, (channels + other[0], size) if other[1] == size and channels + other[0] <= 24 else None
        if kind == "halves":
            return None, (channels // 2, size) if channels % 2 == 0 else None
        if kind == "pool":
            return None, (channels, size // 2) if size > 2 else None
        if kind == "resize":
            return None, (channels, size * 2) if size < 8 else None
        return None, (channels, size)  # relu, silu

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.layers["stem"](x)]
        for kind, one, other, name in self.plan:
            x = maps[one]
            if name in self.layers:
                y = self.layers[name](x)
                y = x * y.sigmoid() if kind == "gate" else y
            elif kind == "add":
                y = x + maps[other]
            elif kind == "cat":
                y = torch.cat([x, maps[other]], 1)
            elif kind == "halves":
                left, right = x.chunk(2, 1)
                y = left * right.tanh()
            elif kind == "pool":
                y = F.max_pool2d(x, 2)
            elif kind == "resize":
                y = F.interpolate(x, scale_factor=2)
            else:
                y = F.relu(x) if kind == "relu" else F.silu(x)
            maps.append(y)
        return self.head(maps[-1].flatten(1) if self.flat else maps[-1].mean((2, 3)))


KINDS = [
    "conv", "conv", "pointwise", "dilated", "strided", "depthwise", "grouped", "up", "norm", "group norm", "gate",
    "add", "add", "cat", "halves", "pool", "resize", "relu", "silu", "shared",
]  # fmt: skip
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30), CHANNELS), min_size=2, max_size=9
)


def _latest(steps: list[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """The same steps, most of which work on what came last: -1 modulo the number of maps."""
    return [(kind, -1 if first % 3 else first, second, width) for kind, first, second, width in steps]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.booleans())
def test_random_networks(steps: list[tuple[str, int, int, int]], flat: bool) -> None:
    torch.manual_seed(0)
    model = Graph(_latest(steps), flat)
    example = torch.rand(2, 3, 8, 8)
    try:
        Channels(model, example)
    except ModelError as error:
        assert "no channels that can be pruned" in str(error)
        return
    checked = check(model, example, densities=(0.5, 0.0))
    assert all(part.reason for part in checked.units.whole)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([2, 3, 5, 7]), min_size=2, max_size=4), st.booleans())
def test_every_channel_of_a_plain_network_is_a_unit(widths: list[int], norms: bool) -> None:
    layers: list[nn.Module] = []
    for channels, out in zip([3, *widths], widths, strict=False):
        layers += [nn.Conv2d(channels, out, 3, padding=1), *([nn.BatchNorm2d(out)] if norms else []), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 4))
    units = Channels(model, torch.rand(1, 3, 6, 6))
    assert units.sizes == widths
    assert [part.reason for part in units.whole] == ["the model's input"]
