"""Small trainings, one after the other, that `test_distributed` runs in some processes.

    distributed_job.py OUT DEVICES ACCUMULATE [METHOD ...]

Each process leaves a file: by method the answer, the model, the pruner's state and the budget.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from harp.attacks import Pgd
from harp.batches import Batches
from harp.engine import launch
from harp.objectives import PgdTraining
from harp.pruners import PRUNERS
from harp.split import Split
from harp.training import fit
from harp.units import Weights

# 'fixed' is what the one-shot methods are once they have their masks.
METHODS: dict[str, dict[str, Any]] = {name: {"keep": 0.05} for name in PRUNERS if name not in ("dense", "fixed")}
METHODS |= {
    "dense": {},
    "hydra, sharpness": {"keep": 0.05, "sharpness": 0.5},
    # The defaults pace themselves by long trainings: these act in a few steps.
    "mad": {"keep": 0.05, "mask_steps": 3},
    "r-admm": {"keep": 0.05, "rho": 0.1, "period": 1},
    "flying-bird": {"keep": 0.05, "interval": 2},
    "flying-bird+": {"keep": 0.05, "interval": 1, "window": 1, "prune_ratio": 0.0, "growth_ratio": 1.0},
}


class FromTheImage(PgdTraining):
    """PGD-AT without a random start, which each rank would draw for itself."""

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return Pgd(self.epsilon, self.step, self.steps, norm=self.norm, random_start=False)(model, x, y)


class Double(nn.Module):
    """So that the order of a sum, which is another in two processes, does not decide between two weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def network() -> nn.Module:
    """No batch norm: its statistics are each rank's own, so that ranks and one process would differ by design."""
    torch.manual_seed(0)
    linear = [nn.Flatten(), nn.Linear(8 * 9, 16), nn.ReLU(), nn.Linear(16, 4)]
    return nn.Sequential(Double(), nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), *linear).double()


def train(fabric: Any, method: str, accumulate: int) -> dict[str, Any]:
    model = network()
    if fabric.global_rank == 1:
        with torch.no_grad():
            model[1].weight.mul_(3)  # a rank that starts elsewhere must be brought in line
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    split = Split(images, torch.arange(64) % 4)
    pruner = PRUNERS[method.partition(",")[0]](Weights(model), **METHODS[method])
    validated = iter([0.5, 0.4, 0.3])  # it gets worse, which Flying Bird+ acts on
    fitted = fit(
        model,
        Batches(split, 16, seed=0),
        FromTheImage(epsilon=0.1, step=0.05, steps=2),
        pruner,
        epochs=3,
        lr=0.1,
        accumulate=accumulate,
        validate=lambda: {"robust": next(validated)},
        fabric=fabric,
    )
    state = {"model": dict(model.state_dict()), "pruner": dict(pruner.state_dict())}
    return {"masks": fitted.masks, "total": pruner.total, **state}


def main(out: str, devices: int, accumulate: int, methods: list[str]) -> None:
    torch.set_num_threads(1)
    fabric = launch("32-true", "cpu", devices)
    torch.save({method: train(fabric, method, accumulate) for method in methods}, f"{out}.{fabric.global_rank}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or list(METHODS))
