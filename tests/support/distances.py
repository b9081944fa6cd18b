"""Networks whose smallest perturbation is known."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("linf", "l2")


def length(offset: Tensor, norm: str) -> Tensor:
    return offset.flatten(1).abs().amax(1) if norm == "linf" else offset.flatten(1).norm(dim=1)


def slow_way(x: Tensor, slope: Tensor, value: float, norm: str) -> Tensor:
    """The shortest way to a plane, by sorting where pixels meet the edge, in double precision."""
    x, slope = x.double(), slope.double()
    down = -slope if value >= 0 else slope
    room = torch.where(down > 0, 1 - x, x)
    pace = (slope != 0).double() if norm == "linf" else slope.abs()
    moving = slope != 0
    meeting = torch.where(moving, room / pace, math.inf)
    meets = meeting[moving].sort().values.tolist()

    def gained(span: float) -> float:
        return float((slope.abs() * torch.minimum(span * pace, room)).sum())

    low, span = 0.0, math.inf
    for high in meets:
        if gained(high) >= abs(value):
            rate = float((slope.abs() * pace)[moving & (meeting > low)].sum())  # not room > low · pace: that is rounded
            span = low + (abs(value) - gained(low)) / rate if rate else low
            break
        low = high
    return down.sign() * (room if span == math.inf else torch.minimum(span * pace, room))


def linear(weight: Tensor, bias: Tensor, shape: tuple[int, ...]) -> nn.Module:
    layer = nn.Linear(weight.shape[1], len(weight))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return nn.Sequential(nn.Flatten(), layer).eval()


def toy(classes: int, images: int = 64) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network trained with noise on noisy patterns, and images to attack."""
    with torch.random.fork_rng():
        torch.manual_seed(classes)
        patterns = torch.rand(classes, 1, 8, 8)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, classes),
        )  # fmt: skip

        def draw(n: int) -> tuple[Tensor, Tensor]:
            y = torch.randint(classes, (n,))
            return (0.5 + 0.5 * (patterns[y] - 0.5) + 0.25 * torch.randn(n, 1, 8, 8)).clamp(0, 1), y

        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(120):
            x, y = draw(64)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.requires_grad_(True).eval()
        x, y = draw(images)
    model.zero_grad()
    return model, x, y


def robust(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(x).argmax(1) == y)
