"""Channels of unusual models: the right result, or a reason that names the line."""

import dataclasses
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.errors import ModelError
from harp.pruning.channels import Channels
from support.slimmed import check


def conv(channels: int, out: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, stride, 1, groups=groups)


class Chain(nn.Module):
    """Two convolutions and a linear layer, with something odd between the two."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None, reads: int = 12) -> None:
        super().__init__()
        self.first, self.second, self.head = conv(3, 12), conv(reads, 6), nn.Linear(6, 4)
        self.between = between or (lambda x: x)

    def forward(self, x: Tensor) -> Any:
        x = self.between(self.first(x).relu())
        return self.head(self.second(x).relu().mean((2, 3)))


def _written(x: Tensor) -> Tensor:
    y = torch.zeros(len(x), 14, 8, 8)
    y[:, :12] = x
    return y


def _added(x: Tensor) -> Tensor:
    y = torch.zeros(len(x), 14, 8, 8)
    y[:, :12] += x
    return y


def _put_out(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.sigmoid(x, out=y)
    return y


def _in_parts(x: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    right.mul_(left.sigmoid_())
    return x


def _unpooled(x: Tensor) -> Tensor:
    pooled, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, places, 2)


# What happens between the two convolutions, what the second reads, and how many of the first's channels are units.
FREE: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "in place": (lambda x: x.mul_(2).sigmoid_(), 12, 12),
    "in place on parts": (_in_parts, 12, 6),
    "into a given tensor": (_put_out, 12, 12),
    "GLU": (lambda x: F.glu(x, 1), 6, 6),
    "gate of chunks": (lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), 6, 6),
    "where": (lambda x: torch.where(x > 0.3, x, torch.zeros_like(x)), 12, 12),
    "hard mask": (lambda x: (x > 0.3).float(), 12, 12),
    "where of numbers": (lambda x: torch.where(x > 0.3, 1.0, 0.5), 12, 12),
    "zero padding": (lambda x: F.pad(x, (1, 2, 0, 1)), 12, 12),
    "padding by a number": (lambda x: F.pad(x, (1, 2, 0, 1), value=3.0), 12, 12),
    "reflection": (lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), 12, 12),
    "constant channels": (lambda x: torch.cat([x, torch.ones(len(x), 2, 8, 8)], 1), 14, 12),
    "padded channels": (lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)), 16, 12),
    "unpooling": (_unpooled, 12, 12),
    "resizing": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), 12, 12),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), 3, 3),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), 48, 12),
    "instance norm": (lambda x: F.instance_norm(x), 12, 12),
    "flip of space": (lambda x: x.flip(2), 12, 12),
    "roll of space": (lambda x: x.roll((1, 2), (2, 3)), 12, 12),
    "squeeze and excitation by itself": (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), 12, 12),
    "inference mode": (torch.inference_mode()(lambda x: x.swapaxes(2, 3) + 1), 12, 12),
    "copied into a new tensor": (lambda x: torch.empty_like(x).copy_(x), 12, 12),
}

# The same, with what the reason must say of the channels that stay.
LOCKED: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
    "roll": (lambda x: x.roll(2, 1), 12, r"roll at test_channels_odd.py:\d+ depends on its position"),
    "sum with a roll": (lambda x: x + x.roll(5, 1), 12, "one channel|roll at test_channels_odd.py"),
    "fixed slice": (lambda x: torch.cat([x[:, :2] * 2, x[:, 2:]], 1), 12, r"slice at test_channels_odd.py:\d+"),
    "slice from the end": (lambda x: torch.cat([x[:, :-1] * 2, x[:, -1:]], 1), 12, "slice at test_channels_odd.py"),
    "slice of a share": (
        lambda x: torch.cat([x[:, : x.shape[1] // 4] * 2, x[:, x.shape[1] // 4 :]], 1),
        12,
        "slice at test_channels_odd.py",
    ),
    "mean over channels": (lambda x: x - x.mean(1, keepdim=True), 12, "mean at test_channels_odd.py"),
    "mean over all": (lambda x: x - x.mean(), 12, "mean at test_channels_odd.py"),
    "softmax over channels": (lambda x: x.softmax(1), 12, "_softmax at test_channels_odd.py"),
    "sorted channels": (lambda x: x.sort(1).values, 12, "sort at test_channels_odd.py"),
    "channels in a computed order": (
        lambda x: x[:, x.mean((0, 2, 3)).argsort()],
        12,
        "(argsort|index) at test_channels_odd.py",
    ),
    "maxout": (lambda x: x.unflatten(1, (6, 2)).amax(2), 6, "amax at test_channels_odd.py"),
    "fixed view": (lambda x: x.view(-1, 12, 8, 8), 12, r"test_channels_odd.py:\d+: "),
    "shuffle": (lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), 12, r"test_channels_odd.py:\d+: "),
    "slice assignment": (_written, 14, "copy_ at test_channels_odd.py"),
    "addition to a part": (_added, 14, "add_ at test_channels_odd.py"),
    "Fourier transform": (lambda x: torch.view_as_real(torch.fft.rfft2(x))[..., 0], 12, "view_as_real at|_fft_r2c at"),
    "group norm": (lambda x: F.group_norm(x, 3), 12, "native_group_norm at test_channels_odd.py"),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), 12, "native_layer_norm at test_channels_odd.py"),
    "NumPy": (lambda x: x - torch.from_numpy(x.numpy().mean(1, keepdims=True)), 12, "the output changes"),
    "a constant per channel": (lambda x: x * torch.arange(12.0)[:, None, None], 12, "mul at test_channels_odd.py"),
    "dropout in eval mode": (lambda x: F.dropout(x, 0.5, True), 12, "the output changes"),
    "patches over channels": (
        lambda x: F.unfold(x.transpose(1, 2), 1).view(-1, 8, 12, 8).transpose(1, 2),
        12,
        "im2col",
    ),
    "drawn by the activations": (
        lambda x: x * torch.multinomial(x.flatten(1) + 0.1, 1).view(-1, 1, 1, 1),
        12,
        "multinomial at",
    ),
    "product of activations": (
        lambda x: x * (x.mean((2, 3)) @ x.mean((2, 3)).t()).diagonal().view(-1, 1, 1, 1),
        12,
        "mm at",
    ),
    "fractional pooling": (lambda x: F.fractional_max_pool2d(x, 2, output_size=4), 12, "fractional_max_pool2d at"),
    "matrix of channels": (lambda x: (torch.ones(1, 12, 12) @ x.flatten(2)).view(-1, 12, 8, 8), 12, "bmm at"),
}


# Their answers are random, or PyTorch counts products of activations too.
UNCHECKED = ("dropout in eval mode", "drawn by the activations", "product of activations")


@pytest.mark.parametrize("name", FREE)
def test_between_two_convolutions_channels_stay_free(name: str) -> None:
    between, reads, units = FREE[name]
    checked = check(Chain(between, reads), torch.rand(2, 3, 8, 8), densities=(0.6, 0.0))
    assert sorted(checked.units.sizes) == sorted([units, 6])


@pytest.mark.parametrize("name", LOCKED)
def test_between_two_convolutions_channels_stay_with_a_reason(name: str) -> None:
    between, reads, reason = LOCKED[name]
    if name in UNCHECKED:
        assert Channels(Chain(between, reads), torch.rand(2, 3, 8, 8)).sizes == [6]
        return
    checked = check(Chain(between, reads), torch.rand(2, 3, 8, 8), densities=(0.6, 0.0))
    assert checked.units.sizes == [6]
    assert re.search(reason, checked.reasons()), checked.reasons()


class Twice(nn.Module):
    sizes = (8,)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.c = conv(3, 8), conv(8, 8), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for _ in range(2):
            x = self.norm(self.b(x)).relu()
        return self.c(x.mean((2, 3)))


class TiedConvolutions(nn.Module):
    sizes = (8, 6)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d, self.c = conv(3, 8), conv(8, 6), conv(8, 6), nn.Linear(6, 4)
        self.d.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c((self.b(x).relu() + self.d(x)).mean((2, 3)))


class TiedDepthwise(nn.Module):
    sizes = (8,)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d = conv(3, 8), conv(8, 8, groups=8), conv(8, 8, groups=8)
        self.d.weight, self.c = self.b.weight, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.d(self.b(self.a(x).relu())).mean((2, 3)))


class TiedTransposed(nn.Module):
    """An autoencoder that uses one matrix both ways."""

    sizes = (16, 20)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.c = nn.Linear(192, 20), nn.Linear(20, 16), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.linear(self.w(self.a(x.flatten(1)).relu()).relu(), self.w.weight.t()))


@dataclasses.dataclass
class Answer:
    logits: Tensor
    features: Tensor


class OfAClass(Chain):
    """Features that are answered must stay, also in a class that PyTorch doesn't know."""

    sizes, reason = (12,), "the model's output"

    def forward(self, x: Tensor) -> Answer:
        features = self.second(self.first(x).relu()).relu().mean((2, 3))
        return Answer(self.head(features), features)


class OfADict(Chain):
    sizes = (12, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": super().forward(x), "name": "odd", "kind": Chain}


class ControlFlow(nn.Module):
    sizes = (8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.layers, self.c = conv(3, 8), nn.ModuleList([conv(8, 8) for _ in range(3)]), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for number, layer in enumerate(self.layers):
            x = F.max_pool2d(layer(x).relu(), 2) if x.shape[-1] > 4 and number % 2 == 0 else x + layer(x)
        return self.c(x.mean((2, 3)))


class OptionA(nn.Module):
    """A shortcut whose new channels are zeros."""

    sizes, reason = (8, 16), r"add at test_channels_odd.py:\d+ combines it with a constant"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d, self.c = conv(3, 8), conv(8, 16, 2), conv(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        y = self.d(self.b(x).relu())
        return self.c((y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))).relu().mean((2, 3)))


class WeightNorm(Chain):
    sizes, reason = (6,), r"convolution at \w+\.py:\d+ has a weight that is computed"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)


class SpectralNorm(Chain):
    sizes, reason = (6,), "has a weight that is computed"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(self.first)


class BareMatrices(nn.Module):
    sizes = (8, 10, 6)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.v = conv(3, 8), nn.Parameter(torch.randn(8, 10)), nn.Parameter(torch.randn(6, 10))
        self.bias, self.c = nn.Parameter(torch.randn(6)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(((self.a(x).relu().mean((2, 3)) @ self.w).relu() @ self.v.T + self.bias).relu())


class EinsumAttention(nn.Module):
    """Heads by a number of the model's own, which must shrink with them."""

    sizes = (16, 3)

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.h, self.depth = nn.Conv2d(3, 16, 4, 4), 3, 3
        self.q, self.k, self.v = (nn.Linear(16, 12) for _ in range(3))
        self.o, self.c = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = (f(x).reshape(*x.shape[:2], self.h, -1) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k).softmax(-1)
        return self.c((x + self.o(torch.einsum("bhnm,bmhd->bnhd", scores, v).flatten(2))).mean(1))


class CrossCovariance(nn.Module):
    """Attention between channels, as in XCiT."""

    sizes = (16, 3)

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.heads = nn.Conv2d(3, 16, 4, 4), 3
        self.qkv, self.o, self.c = nn.Linear(16, 36), nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 4, 1)
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.c((x + self.o(mixed.permute(0, 3, 1, 2).flatten(2))).mean(1))


class NonLocal(nn.Module):
    """One head: only the values can be pruned."""

    sizes = (8, 10)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.q, self.k, self.v = conv(3, 8), nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(8, 10, 1)
        self.o, self.c = nn.Conv2d(10, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        q, k, v = (f(x).flatten(2) for f in (self.q, self.k, self.v))
        scores = (q.transpose(1, 2) @ k).softmax(-1)
        return self.c((x + self.o((v @ scores.transpose(1, 2)).unflatten(2, (8, 8)))).mean((2, 3)))


class LearnedQueries(nn.Module):
    sizes, reason = (16,), "scaled_dot_product"

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.k, self.v = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 12), nn.Linear(16, 12)
        self.queries, self.c = nn.Parameter(torch.randn(1, 3, 5, 4)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        k, v = (f(x).reshape(*x.shape[:2], 3, -1).transpose(1, 2) for f in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.queries.expand(len(x), -1, -1, -1), k, v)
        return self.c(mixed.transpose(1, 2).flatten(2).mean(1))


class OwnWeights(Chain):
    """Decisions by the model's own weights, and constants of their shape, are the same for all inputs."""

    sizes = (12, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.head.bias.sum() > 100:
            return x
        return super().forward(x) + torch.zeros_like(self.head.weight).sum()


class ConstantBias(Chain):
    sizes, reason = (6,), "its bias or scale is computed"

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.first.weight, torch.arange(12.0), padding=1).relu()
        return self.head(self.second(x).relu().mean((2, 3)))


class Columns(nn.Module):
    """Features in columns, with a weight on their left; a bias can't be followed there."""

    sizes, reason = (8,), "addmm at"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.v = conv(3, 8), nn.Parameter(torch.randn(10, 8)), nn.Parameter(torch.randn(7, 10))
        self.bias, self.c = nn.Parameter(torch.randn(7, 1)), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.w @ self.a(x).relu().mean((2, 3)).t()).relu()
        return self.c(torch.addmm(self.bias, self.v, y).t().relu())


class ReshapedMatrix(nn.Module):
    sizes, reason = (8,), "mm at"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w, self.c = conv(3, 8), conv(8, 12), nn.Parameter(torch.randn(4, 6)), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.linear(self.b(self.a(x).relu()).relu().mean((2, 3)), self.w.view(2, 12)))


class OneOfTwo(Chain):
    """Either space can be cut, but not both."""

    sizes, reason = (6,), "both are narrow"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = self.second(x).relu().mean((2, 3))
        if x.shape[1] < 12 and y.shape[1] < 6:
            raise ValueError("both are narrow")
        return self.head(y)


class WidthInTheAnswer(Chain):
    sizes, reason = (6,), "without it the output changes"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), torch.zeros(self.first.out_channels)


class ReadTwice(nn.Module):
    """Two spaces that the same weights read and give first: their names are numbered."""

    sizes, reason = (8, 6), r"test_channels_odd.py:\d+: Given groups=1"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d, self.c = conv(3, 12), conv(12, 6), conv(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c((self.b(x) + self.d(x[:, :4])).relu().mean((2, 3)))


class BiasedAttention(nn.Module):
    """A learned bias of the scores for each head, which is pruned with the head."""

    sizes = (16, 3)

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.heads = nn.Conv2d(3, 16, 4, 4), 3
        self.q, self.k, self.v = (nn.Linear(16, 12) for _ in range(3))
        self.o, self.c, self.bias = nn.Linear(12, 16), nn.Linear(16, 4), nn.Parameter(torch.randn(3, 4, 4))

    def scores(self, x: Tensor) -> Tensor:
        return self.bias[None]

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = (f(x).reshape(*x.shape[:2], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.scores(x))
        return self.c((x + self.o(mixed.transpose(1, 2).flatten(2))).mean(1))


class BareBias(BiasedAttention):
    """The bias is given as it is, so that PyTorch takes another kernel, which keeps a gradient for it."""

    def scores(self, x: Tensor) -> Tensor:
        return self.bias


class FrozenBias(BiasedAttention):
    def __init__(self) -> None:
        super().__init__()
        self.bias.requires_grad_(False)


class SharedBias(BiasedAttention):
    """The same bias for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 4), requires_grad=False)


class ComputedBias(BiasedAttention):
    """A bias that a layer computes for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.by_head = nn.Linear(16, 3)

    def scores(self, x: Tensor) -> Tensor:
        return self.by_head(x).transpose(1, 2)[:, :, None].expand(-1, -1, 4, -1)


class OneHead(nn.Module):
    """One head: only the values can be pruned."""

    sizes = (16, 10)

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.q, self.k, self.v = (
            nn.Conv2d(3, 16, 4, 4),
            nn.Linear(16, 12),
            nn.Linear(16, 12),
            nn.Linear(16, 10),
        )
        self.o, self.c = nn.Linear(10, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        return self.c((x + self.o(F.scaled_dot_product_attention(q, k, v)[:, 0])).mean(1))


class ThreeKinds(nn.Module):
    """A parameter with an axis for the channels of each of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.randn(7, 8, 9))
        self.a, self.b, self.d = nn.Linear(192, 7), nn.Linear(192, 8), nn.Linear(192, 9)
        self.heads = nn.ModuleList([nn.Linear(width, 4) for width in (7, 8, 9)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        one = (self.a(x)[:, :, None, None] * self.all).sum((2, 3))
        two = (self.b(x)[:, None, :, None] * self.all).sum((1, 3))
        three = (self.d(x)[:, None, None, :] * self.all).sum((1, 2))
        return sum(head(y) for head, y in zip(self.heads, (one, two, three), strict=True))


class PlainNorms(nn.Module):
    """Norms without statistics or without a scale, and a parameter that is no floating-point number."""

    sizes = (8, 6)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = conv(3, 8), nn.BatchNorm2d(8, affine=False), conv(8, 6)
        self.m, self.c = nn.BatchNorm2d(6, track_running_stats=False), nn.Linear(6, 4)
        self.steps = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.m(self.b(self.n(self.a(x)).relu())).relu().mean((2, 3)))


class Unused(Chain):
    sizes = (12, 6)

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.deaf = nn.Linear(7, 7), conv(12, 9)

    def forward(self, x: Tensor) -> Tensor:
        self.deaf(self.first(x))
        return super().forward(x)


class OneImage(Chain):
    sizes, images = (12, 6), 1

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 1
        return super().forward(x)


class Sound(nn.Module):
    sizes, shape = (8, 10), (3, 64)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b, self.c = nn.Conv1d(3, 8, 5, 2), nn.BatchNorm1d(8), nn.Conv1d(8, 10, 3), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.max_pool1d(self.b(self.n(self.a(x)).relu()).relu(), 2).mean(2))


class Volume(nn.Module):
    sizes, shape = (8, 10), (3, 4, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b, self.c = nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.Conv3d(8, 10, 1), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.adaptive_avg_pool3d(self.b(self.n(self.a(x)).relu()).relu(), 1).flatten(1))


class Recurrent(nn.Module):
    sizes, shape = (8,), (3, 64)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.c = nn.Conv1d(3, 8, 5, 2), nn.GRU(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.r(self.a(x).relu().transpose(1, 2))[0][:, -1])


class Halves(nn.Module):
    """Two halves that are read apart: they must stay equally wide, so they stay."""

    sizes, reason = (5, 7), r"split at test_channels_odd.py:\d+ needs parts of equal width"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d, self.c = conv(3, 16), conv(8, 5), conv(8, 7), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).relu().chunk(2, 1)
        return self.c(torch.cat([self.b(left), self.d(right)], 1).relu().mean((2, 3)))


class SplitWeight(nn.Module):
    sizes, reason = (6,), "needs parts of equal width"

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.c = nn.Parameter(torch.randn(20, 192)), nn.Linear(20, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.w.chunk(2)
        return self.c(self.v(torch.cat([F.linear(x.flatten(1), left), F.linear(x.flatten(1), right)], 1)).relu())


class OneLogit(nn.Module):
    sizes, reason = (12, 6, 9), "one channel"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.one = conv(3, 12), conv(12, 6), nn.Linear(6, 1)
        self.many, self.c = nn.Linear(1, 9), nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.many(self.one(self.b(self.a(x).relu()).relu().mean((2, 3)))).relu())


class SpatialGate(Chain):
    """A gate of one channel that all others are multiplied by; a PReLU with one slope."""

    sizes = (12, 6)

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.slope = nn.Conv2d(12, 1, 1), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.slope(x * self.gate(x).sigmoid() - 0.2)
        return self.head(self.second(x).relu().mean((2, 3)))


class Slopes(Chain):
    sizes = (12, 6)

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.PReLU(12)


class Attended(Chain):
    """Attention over positions by the mean and the maximum of channels, as in CBAM."""

    sizes, reason = (6,), "mean at test_channels_odd.py"

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x * self.gate(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)).sigmoid()
        return self.head(self.second(x).relu().mean((2, 3)))


class FixedMatrix(nn.Module):
    sizes, reason = (8, 10), "with a buffer"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 8), nn.Linear(10, 4)
        self.register_buffer("m", torch.randn(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.b(self.a(x).relu()).relu().mean((2, 3)) @ self.m).relu())


class FixedKernel(nn.Module):
    """A blur by a buffer, with a number of channels that the model remembers."""

    sizes = (8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.channels = conv(3, 8), conv(8, 8), nn.Linear(8, 4), 8
        self.register_buffer("kernel", torch.rand(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.conv2d(self.b(self.a(x).relu()).relu(), self.kernel, groups=self.channels).mean((2, 3)))


class FoldedBatch(nn.Module):
    """Channels of the image as images of their own."""

    sizes = (8, 6)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x.reshape(-1, 1, 8, 8)).relu()).relu().mean((2, 3))
        return self.c(y.reshape(len(x), 3, -1).sum(1))


class ConstantBranch(nn.Module):
    """Layers that read constants only, as for relative positions: counted once an image."""

    sizes = (9, 8)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.one, self.two, self.c = conv(3, 8), nn.Linear(2, 9), nn.Linear(9, 8), nn.Linear(8, 4)
        self.grid = torch.rand(63, 2)

    def forward(self, x: Tensor) -> Tensor:
        offset = self.two(self.one(self.grid).relu()).mean(0)
        return self.c((self.a(x) + offset[:, None, None]).relu().mean((2, 3)))


class Positions(Chain):
    """Parameters of three axes, of which one is the channels'; and of positions only."""

    sizes = (12, 6)

    def __init__(self) -> None:
        super().__init__()
        self.by_channel, self.all = nn.Parameter(torch.randn(1, 12, 8, 8)), nn.Parameter(torch.randn(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x) + self.by_channel) * self.all
        return self.head(self.second(x).relu().mean((2, 3)))


class Patches(nn.Module):
    sizes = (12, 7)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 12), nn.Linear(108, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(self.a(x).relu(), 3, padding=1).transpose(1, 2)
        return self.c(self.b(patches).relu().mean(1))


class GroupedUp(nn.Module):
    sizes, reason = (6,), "grouped transposed convolution"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.up, self.b = conv(3, 8), nn.ConvTranspose2d(8, 12, 2, 2, groups=2), conv(12, 6)
        self.c = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.up(self.a(x).relu()).relu()).relu().mean((2, 3)))


class CosineHead(Chain):
    sizes, reason = (12,), ""

    def forward(self, x: Tensor) -> Tensor:
        features = self.second(self.first(x).relu()).mean((2, 3))
        return F.linear(F.normalize(features), F.normalize(self.head.weight))


class Vanishing(nn.Module):
    """So small weights that a wrong cut could hardly be seen in the answer."""

    sizes, reason = (8,) * 9, r"slice at test_channels_odd.py"

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.c = nn.ModuleList([conv(3, 8), *(conv(8, 8) for _ in range(9))]), nn.Linear(8, 4)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.003)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu()
            x = torch.cat([x[:, :3] * 2, x[:, 3:]], 1) if number == 2 else x
        return self.c(x.mean((2, 3)))


ODD = [
    Twice, TiedConvolutions, TiedDepthwise, TiedTransposed, OfAClass, OfADict, ControlFlow, OptionA, WeightNorm,
    SpectralNorm, BareMatrices, EinsumAttention, CrossCovariance, NonLocal, LearnedQueries, Unused, OneImage, Sound,
    Volume, Recurrent, Halves, SplitWeight, OneLogit, SpatialGate, Slopes, Attended, FixedMatrix, FixedKernel,
    FoldedBatch, ConstantBranch, Positions, Patches, GroupedUp, CosineHead, Vanishing, BiasedAttention, SharedBias,
    BareBias, FrozenBias, ComputedBias, OneHead, PlainNorms, OwnWeights, ConstantBias, Columns, ReshapedMatrix,
    OneOfTwo, WidthInTheAnswer, ReadTwice,
]  # fmt: skip


@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_odd_models(kind: Any) -> None:
    example = torch.rand(getattr(kind, "images", 2), *getattr(kind, "shape", (3, 8, 8)))
    checked = check(kind(), example, densities=(0.6, 0.0))
    assert sorted(checked.units.sizes) == sorted(kind.sizes)
    assert re.search(getattr(kind, "reason", ""), checked.reasons()), checked.reasons()


class EinsumLayer(nn.Module):
    """A linear layer written as a product of sums over one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.c = conv(3, 8), nn.Parameter(torch.randn(8, 10)), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu().flatten(2)
        return self.c(torch.einsum("bcn,cd->bnd", x, self.w).relu().mean(1))


class Root(Chain):
    """A root of a parameter, which is NaN for most other values of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.full((12, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu() * (1 + self.tiny.sqrt())).relu().mean((2, 3)))


def test_a_layer_that_is_written_as_an_einstein_sum() -> None:
    assert Channels(EinsumLayer(), torch.rand(1, 3, 8, 8)).sizes == [8, 10]


def test_weights_that_bear_no_noise_are_tried_as_they_are() -> None:
    assert Channels(Root(), torch.rand(1, 3, 8, 8)).sizes == [12, 6]


def test_only_numbers_that_are_needed_shrink() -> None:
    units = Channels(EinsumAttention(), torch.rand(1, 3, 8, 8))
    masks = units.expand([torch.arange(size) < 2 for size in units.sizes])
    assert units.cut(masks).sizes[""] == {"h": 2}  # and not the depth, which happens to be 3 as well


class Deciding(Chain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.sum() > 0 else x


class Counting(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


class Gram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = conv(3, 5), nn.Linear(25, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.a(x).flatten(2)
        return self.c((features @ features.transpose(1, 2)).flatten(1))


class Locked(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.LazyConv2d(8, 3), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).relu().mean((2, 3)))


def _old_weight_norm() -> nn.Module:
    model = Chain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.second)
    return model


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.Sequential(conv(3, 4), conv(4, 2)), torch.rand(1, 3, 8, 8))


def _damaged() -> nn.Module:
    model = Chain()
    nn.init.constant_(model.second.weight, float("nan"))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "decides by a value": (Deciding, r"_local_scalar_dense at test_channels_odd.py:\d+"),
    "returns whole numbers": (Counting, "returns no floating-point tensor"),
    "one layer": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)),
        "no channels that can be pruned: the model's input",
    ),
    "no parameters": (nn.Flatten, "no parameters"),
    "channels of three kinds": (ThreeKinds, "all lies along channels of three kinds"),
    "Gram matrix": (Gram, "bmm at|one channel"),
    "holds a lock": (Locked, "can't be copied"),
    "lazy": (Lazy, "not initialised"),
    "old weight norm": (_old_weight_norm, "has a weight that is computed"),
    "scripted": (_scripted, "TorchScript"),
    "NaN": (_damaged, "returns NaN"),
    "wrong size": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 4)), "can't run on an example of shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason) as refused:
        Channels(make(), torch.rand(2, 3, 8, 8))
    assert len(str(refused.value).splitlines()) == 1


def test_an_example_must_be_a_batch() -> None:
    with pytest.raises(ModelError, match="no batch"):
        Channels(Chain(), torch.rand(0, 3, 8, 8))


def test_the_model_is_left_as_it_was() -> None:
    class Counter(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("last", None)
            self.norm = nn.BatchNorm2d(12)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.last = self.norm(self.first(x)).relu()
            x = F.dropout(self.last, 0.0) * (1 + 0 * torch.rand(1))
            return self.head(self.second(x).relu().mean((2, 3)))

    model = Counter().train()
    model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example, seed = torch.rand(2, 3, 8, 8), torch.get_rng_state()
    given = example.clone()
    units = Channels(model, example)
    masks = units.expand([torch.arange(size) < 3 for size in units.sizes])
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
            before[name] = before[name] * mask
    small = units.slim(model, masks)
    assert torch.equal(torch.get_rng_state(), seed) and torch.equal(example, given)
    assert model.training and not model.norm.training and small.training and not small.norm.training
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_foreign_masks_are_refused() -> None:
    model = Chain()
    units = Channels(model, torch.rand(2, 3, 8, 8))
    masks = units.expand([torch.arange(size) < 3 for size in units.sizes])
    with pytest.raises(ModelError, match="off by"):
        units.slim(model, masks)  # its weights were never masked


def test_a_smaller_network_that_does_not_run_is_reported() -> None:
    class Strict(Chain):
        strict = False

        def forward(self, x: Tensor) -> Tensor:
            if self.strict and self.first.out_channels < 12:
                raise ValueError("too narrow")
            return super().forward(x)

    model = Strict()
    units = Channels(model, torch.rand(2, 3, 8, 8))
    model.strict = True
    with pytest.raises(ModelError, match="the smaller network doesn't run: too narrow"):
        units.slim(model, units.expand([torch.arange(size) < 3 for size in units.sizes]))
