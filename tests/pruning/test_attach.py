"""`attach` in a loop of one's own: closures, schedules, and the optimiser's state as the pruner's."""

from typing import Any

import pytest
import torch
from torch import nn

from harp.errors import CheckpointError
from harp.pruning.methods import PRUNERS, Hydra, Pruner
from harp.pruning.units import Weights
from support import cases

KEEP = 0.1


def setup(method: str) -> tuple[nn.Module, torch.optim.Optimizer, Pruner]:
    model = cases.build("residual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, PRUNERS[method](Weights(model), keep=KEEP).attach(optimizer)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, closure: bool = False) -> None:
    x, y = cases.batch(seed=number)

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    if closure:
        optimizer.step(backward)
    else:
        backward()
        optimizer.step()


@pytest.mark.parametrize("method", ["harp", "hydra", "magnitude"])
def test_a_closure_trains_as_a_backward_before_the_step(method: str) -> None:
    states = []
    for closure in (False, True):
        model, optimizer, pruner = setup(method)
        for number in range(4):
            step(model, optimizer, number, closure=closure)
        pruner.finish()
        states.append(model.state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize("method", ["harp", "hydra", "magnitude", "flying-bird"])
def test_the_optimisers_state_resumes_the_pruner(method: str) -> None:
    model, optimizer, pruner = setup(method)
    saved: list[Any] = []
    for number in range(6):
        if number == 3:
            pruner.after_epoch()
            states = (model.state_dict(), optimizer.state_dict())
            saved = [{name: value.clone() for name, value in states[0].items()}, _copied(states[1])]
        step(model, optimizer, number)
    pruner.finish()

    again, other, resumed = setup(method)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for number in range(3, 6):
        step(again, other, number)
    resumed.finish()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, (list, tuple)) else value


def test_a_state_without_a_pruner_is_refused() -> None:
    model = cases.build("conv")
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Hydra(Weights(model), KEEP).attach(optimizer)
    with pytest.raises(CheckpointError, match="holds no pruner"):
        optimizer.load_state_dict(state)
