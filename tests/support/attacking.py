"""Networks to attack, and what an attack must leave alone."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks.batched import Packing
from harp.attacks.fast_forward import frozen


def snapshot(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [module.training for module in model.modules()],
        [tensor.detach().clone() for tensor in tensors],
        [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [set(vars(module)) for module in model.modules()],
    ]


def assert_untouched(model: nn.Module, before: list[Any]) -> None:
    after = snapshot(model)
    assert (after[0], after[2], after[4]) == (before[0], before[2], before[4])
    for one, other in zip(after[1] + after[3], before[1] + before[3], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


BALLS = {"linf": 0.04, "l2": 0.35}


class Calls(nn.Module):
    """Counts the images a model is asked about."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.sizes = inner, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.inner(x)


def task(classes: int, count: int, seed: int = 0, side: int = 8) -> tuple[Tensor, Tensor]:
    """Images around one random prototype a class, which is the same for every seed."""
    prototypes = torch.rand(classes, 1, side, side, generator=torch.Generator().manual_seed(classes))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=generator)
    noise = torch.rand(count, 1, side, side, generator=generator)
    return (0.35 * prototypes[y] + 0.65 * noise), y


@cache
def trained(classes: int, steps: int = 100) -> nn.Module:
    """A small network that is partly robust on `task`: some seconds at most."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, classes),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = task(classes, 128, seed=1000 + step)
        x = x + 0.03 * torch.randn(x.shape).sign()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1) == y


def run(attack: Any, model: nn.Module, x: Tensor, y: Tensor, batch: int | None = None, seed: int = 0) -> Packing:
    """The attack through the model itself."""
    with torch.no_grad():
        packing = Packing(attack, model, x, y, batch=batch or len(x), seed=seed)
        packing.run()
    return packing


def near_the_boundary() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A model, images that it gets right and its folded form wrong, their labels, and the direction to the boundary.

    The model loses to rounding what its batch norm subtracts from a large sum. Folded into the bias it is not lost.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 4), nn.BatchNorm2d(2, affine=False, eps=0), nn.Flatten()).eval()
    with torch.no_grad():
        model[0].bias.fill_(100)
        model[1].running_mean.fill_(100)
        model[0].weight -= model[0].weight.mean((2, 3), keepdim=True)  # grey images are on the boundary
        apart = model[0].weight[0] - model[0].weight[1]
        x = 0.5 + 0.02 * torch.randn(400, 1, 4, 4)
        lead = (x.double() * apart.double()).flatten(1).sum(1) / apart.double().square().sum()
        x = x - lead.float()[:, None, None, None] * apart  # on the boundary
        y = model(x).argmax(1)
        with frozen(model, x) as net:
            doubtful = net(x).argmax(1) != y
    assert doubtful.sum() > 20
    return model, x[doubtful], y[doubtful], apart


def drawn_from(cumulative: Callable[[Tensor], Tensor], values: Tensor) -> bool:
    """Whether values can be of this distribution: the test of Kolmogorov and Smirnov.

    The largest gap between the shares of n values below each of them and the distribution is hardly ever above 3 / √n.
    """
    values = values.flatten().double().sort().values
    shares = (torch.arange(len(values), dtype=torch.float64) + 0.5) / len(values)
    return float((shares - cumulative(values)).abs().max()) < 3 / math.sqrt(len(values))
