"""The model shapes that every contract test runs over: tiny, but each with what breaks naive pruning code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harp.pruning.masks import Masks
from harp.pruning.units import checked_total


class ConvNet(nn.Module):
    """Convolution, batch norm, dropout, linear layers with bias."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class Residual(nn.Module):
    """A residual block with a projection shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(16)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.stem(x)))
        y = torch.relu(self.bn2(self.conv1(x)))
        y = torch.relu(self.bn3(self.conv2(y)) + self.shortcut(x))
        return self.linear(y.mean(dim=(2, 3)))


class Transformer(nn.Module):
    """A vision transformer: MultiheadAttention's packed weight, class token, position embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


class Tied(nn.Module):
    """One weight used twice: it must get one mask, and both uses must see it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * 8 * 8, 24)
        self.up = nn.Linear(24, 24)
        self.down = nn.Linear(24, 24)
        self.down.weight = self.up.weight
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.inner(x.flatten(1)))
        return self.head(torch.relu(self.down(torch.relu(self.up(x)))))


class Grouped(nn.Module):
    """Grouped and depthwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1, groups=12),
            nn.Conv2d(12, 24, 3, stride=2, padding=1, groups=3, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


CASES: dict[str, Callable[[], nn.Module]] = {
    "conv": ConvNet,
    "residual": Residual,
    "transformer": Transformer,
    "tied": Tied,
    "grouped": Grouped,
}


def batch(n: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random images in [0, 1] and labels of four classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 3, 8, 8, generator=generator), torch.randint(4, (n,), generator=generator)


def build(name: str, seed: int = 0) -> nn.Module:
    """A case with seeded weights and batch-norm statistics that are not the trivial ones."""
    torch.manual_seed(seed)
    model = CASES[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


class Filters:
    """Channels of `ConvNet` as units, by hand: what the units' protocol asks, in the fewest words.

    Three layers of 8, 16 and 16 channels; a channel masks the columns of the weight that reads it (four a channel where
    the images are flattened). The cost is that of the multiplications: bilinear in neighbouring counts.
    """

    kind, noun, example = "channels", "MACs", None
    initial_rate, gamma_step = 1.0, 0.02
    names = ["first", "second", "hidden"]  # noqa: RUF012
    masked = ["features.4.weight", "classifier.0.weight", "classifier.3.weight"]  # noqa: RUF012
    sizes, fans = [8, 16, 16], [72, 64, 16]
    singles = np.array([3 * 9 * 64.0, 0, 4])
    pairs = np.array([[0, 9 * 16.0, 0], [0, 0, 4.0], [0, 0, 0]])

    def __init__(self, model: nn.Module, steps: Sequence[int] = (1, 1, 1), lower: Sequence[int] = (1, 1, 1)) -> None:
        self.model, self.steps, self.lower, self.upper = model, list(steps), list(lower), list(self.sizes)
        self.floors, self.ceilings = [low / n for low, n in zip(lower, self.sizes, strict=True)], [1.0] * 3
        self.size = self.spend(self.sizes)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.model.get_parameter(name) for name in self.masked]

    def total(self, keep: float) -> int:
        return checked_total(self, keep)

    def spend(self, counts: Sequence[int]) -> int:
        kept = np.array(counts, dtype=np.float64)
        return int(self.singles @ kept + kept @ self.pairs @ kept)

    def cost(self, rates: Tensor) -> Tensor:
        kept = rates * torch.tensor(self.sizes)
        return torch.from_numpy(self.singles) @ kept + kept @ torch.from_numpy(self.pairs) @ kept

    def slope(self, rates: Any) -> tuple[float, Any]:
        kept = rates * np.array(self.sizes)
        gradient = (self.singles + (self.pairs + self.pairs.T) @ kept) * np.array(self.sizes)
        return float(self.singles @ kept + kept @ self.pairs @ kept), gradient

    def counts(self, rates: Sequence[float]) -> list[int]:
        return [max(low, round(a * n)) for a, n, low in zip(rates, self.sizes, self.lower, strict=True)]

    def spent(self, masks: Mapping[str, Tensor]) -> int:
        columns = self.gather([masks[name].float() for name in self.masked])
        return self.spend([int(column.count_nonzero()) for column in columns if column is not None])

    def uniform_rate(self, total: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.slope(np.full(3, middle))[0] <= total else (low, middle)
        return low

    def columns(self, values: Tensor, layer: int) -> Tensor:
        """A weight's entries by the channel that they read."""
        return values.reshape(len(values), self.sizes[layer], -1).transpose(0, 1).flatten(1)

    def strength(self, values: Sequence[Tensor], order: int) -> list[Tensor]:
        return [self.columns(value.detach(), i).norm(order, dim=1) for i, value in enumerate(values)]

    def gather(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if g is None else self.columns(g, i).sum(1) for i, g in enumerate(gradients)]

    def expand(self, masks: Sequence[Tensor]) -> Masks:
        found = {}
        for name, weight, mask in zip(self.masked, self.weights, masks, strict=True):
            blocks = mask[None, :, None].expand(len(weight), len(mask), weight[0].numel() // len(mask))
            found[name] = blocks.reshape(weight.shape).clone()
        return found
