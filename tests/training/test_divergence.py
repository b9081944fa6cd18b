"""A training with NaN or infinite numbers stops, reports the step, and keeps the last good state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harp.errors import Diverged
from harp.pruning.methods import Dense
from harp.pruning.units import Weights
from harp.system.interrupt import Stop
from harp.system.tensors import load_state
from harp.training import divergence
from harp.training.checkpointing import Keeper
from harp.training.divergence import Guard
from harp.training.loop import fit
from harp.training.objectives import Natural
from support import cases
from support.methods import Three

BAD = [float("nan"), float("inf"), -float("inf")]


class Fabric:
    """As much of a fabric as the guard looks at."""

    world_size, device = 1, torch.device("cpu")


def guard(at_once: bool = True) -> tuple[Guard, dict[str, Tensor]]:
    named = {"a": torch.ones(3, requires_grad=True), "b": torch.ones(2, 2, requires_grad=True)}
    named |= {"empty": torch.ones(0, requires_grad=True), "frozen": torch.ones(1)}
    for name in ("a", "b", "empty"):
        named[name].grad = torch.zeros_like(named[name])
    watcher = Guard(named, Fabric())
    watcher.at_once = at_once
    return watcher, named


@pytest.mark.parametrize("value", BAD)
def test_the_message_names_the_gradient_or_the_loss(value: float) -> None:
    watcher, named = guard()
    watcher.watch(1.0, "epoch 1, step 1, at learning rate 0.1")
    named["b"].grad[0, 1] = value  # type: ignore[index]
    with pytest.raises(Diverged, match=r"^the gradient of b became NaN or infinite in epoch 1, step 2: try a smaller"):
        watcher.watch(1.0, "epoch 1, step 2")
    named["a"].grad[2] = value  # type: ignore[index]
    with pytest.raises(Diverged, match="the gradient of a and 1 more became"):
        watcher.watch(1.0, "here")
    with pytest.raises(Diverged, match=rf"^the loss became {value} in there"):
        watcher.watch(value, "there")


def test_a_deferred_check_names_the_step_that_diverged() -> None:
    watcher, named = guard(at_once=False)
    named["a"].grad[0] = float("nan")  # type: ignore[index]
    watcher.watch(1.0, "step 1")
    named["a"].grad.zero_()  # type: ignore[union-attr]
    with pytest.raises(Diverged, match=r"the gradient of a .* in step 1"):
        watcher.watch(float("nan"), "step 2")
    watcher.check()  # the error is raised once


def test_weights_that_are_not_finite_are_refused() -> None:
    big = torch.full((100,), 3e38)  # its norm is more than a float can hold, but it is finite
    divergence.check_weights({"big": big, "count": torch.ones(3, dtype=torch.long), "none": torch.ones(0)}, "here")
    for value in BAD:
        with pytest.raises(Diverged, match=r"^w became NaN or infinite in here"):
            divergence.check_weights({"big": big, "w": torch.tensor([1.0, value])}, "here")
    assert divergence.unfinite({}) == []


class Poisoned(Natural):
    """Natural training until a step, whose loss, gradient or weights are made not finite."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__()
        self.left, self.what = at, what

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Any = None) -> Tensor:
        loss = super().__call__(model, x, y, forward=forward)
        self.left -= 1
        if self.left == 0:
            if self.what == "loss":
                return loss * float("nan")
            if self.what == "gradient":
                next(model.parameters()).register_hook(lambda grad: grad * float("inf"))
            else:
                model.get_buffer("statistics").fill_(float("nan"))
        return loss


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loss", "the loss became nan in epoch 2, step 2"),
        ("gradient", r"the gradient of \S+ became NaN or infinite in epoch 2, step 2"),
        ("weights", r"\S+ became NaN or infinite in epoch 2, step 2"),
    ],
)
def test_a_diverged_state_does_not_replace_the_last_good_one(tmp_path: Path, what: str, message: str) -> None:
    model = cases.build("conv")
    model.register_buffer("endless", torch.tensor([-float("inf"), 0.0]))  # it was so from the beginning
    model.register_buffer("statistics", torch.zeros(2))
    keeper = Keeper(tmp_path / "state.pt", Stop(), minutes=0, of="x")
    with pytest.raises(Diverged, match=rf"^{message}, at learning rate \S+: try a smaller one"):
        fit(model, Three(), Poisoned(5, what), Dense(Weights(model)), epochs=3, lr=0.1, keeper=keeper)
    state = load_state(tmp_path / "state.pt")
    assert (state["epoch"], state["step"]) == (1, 1)
    assert keeper.good == f"{tmp_path / 'state.pt'} (epoch 2, step 1)"
    for name, tensor in state["model"].items():
        assert name == "endless" or bool(tensor.isfinite().all())
