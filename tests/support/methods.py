"""Every method on a small network, and a few steps of training."""

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harp.pruning.methods import PRUNERS, Fixed, Magnitude, Pruner
from harp.pruning.units import Weights
from support import cases

KEEP = 0.1

# At 2 %, which is below the rate that HARP starts from as published, the rates have a way to go.
PUBLISHED = {"keep": 0.02, "published": True, "gamma_step": 0.1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "harp at 2 %": ("harp", {"keep": 0.02}),
    "harp as published": ("harp", PUBLISHED),
    "harp-r as published": ("harp-r", PUBLISHED),
    "tandem at 2 %": ("tandem", {"keep": 0.02}),
}


def make(method: str, model: nn.Module, **options: Any) -> Pruner:
    units = Weights(model)
    if method == "fixed":
        return Fixed(units, Magnitude(units, KEEP).masks())
    method, preset = VARIANTS.get(method, (method, {} if method == "dense" else {"keep": KEEP}))
    return PRUNERS[method](units, **preset, **options)


def train(model: nn.Module, pruner: Pruner, steps: int = 4, forward: Callable[..., Any] | None = None) -> None:
    """A plain loop by the hooks."""
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    pruner.start()
    for step in range(steps):
        x, y = cases.batch(seed=step)
        optimizer.zero_grad()
        nn.functional.cross_entropy((model if forward is None else forward)(x), y).backward()
        pruner.after_backward()
        optimizer.step()
        pruner.after_step()


class Memory:
    """A keeper in memory that stops the training after so many saves, as bytes, so that nothing is shared."""

    def __init__(self, stop_after: int | None = None, state: bytes | None = None) -> None:
        self.stop_after, self.state, self.saves = stop_after, state, 0

    def load(self) -> dict[str, Any] | None:
        return None if self.state is None else torch.load(io.BytesIO(self.state), weights_only=True)

    def due(self, last: bool = False) -> bool:
        return not last

    def save(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.state = buffer.getvalue()
        self.saves += 1
        if self.saves == self.stop_after:
            raise InterruptedError


class Three:
    """Three batches an epoch."""

    def __len__(self) -> int:
        return 3

    def __call__(self, epoch: int, start: int = 0) -> Any:
        return (cases.batch(seed=3 * epoch + i) for i in range(start, 3))


def assert_same_state(pruner: Pruner, expected: Pruner) -> None:
    """All that a checkpoint holds of two pruners is the same, to the bit."""
    state = pruner.state_dict()
    for name, value in expected.state_dict().items():
        same = torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value
        assert same, f"{name}: {state[name]} instead of {value}"
