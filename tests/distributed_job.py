"""A small HARP training, run by `test_distributed` in some processes: `distributed_job.py OUT DEVICES ACCUMULATE`."""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harp.attacks import Pgd
from harp.batches import Batches
from harp.engine import launch
from harp.pruners import Harp
from harp.split import Split
from harp.training import fit
from harp.units import Weights


def objective(model: nn.Module, x: Tensor, y: Tensor, forward: nn.Module) -> Tensor:
    """PGD-AT without a random start, which each rank would draw for itself."""
    return F.cross_entropy(forward(Pgd(0.1, 0.05, 2, random_start=False)(model, x, y)), y)


def main(out: str, devices: int, accumulate: int) -> None:
    torch.set_num_threads(1)
    fabric = launch("32-true", "cpu", devices)
    torch.manual_seed(0)
    # No batch norm: its statistics are each rank's own, so that ranks and one process would differ by design.
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 16), nn.Linear(16, 4))
    if fabric.global_rank == 1:
        with torch.no_grad():
            model[0].weight.mul_(3)  # a rank that starts elsewhere must be brought in line
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    split = Split(images, torch.arange(64) % 4)
    pruner = Harp(Weights(model), keep=0.05)
    options = {"epochs": 3, "lr": 0.1, "accumulate": accumulate}
    fitted = fit(model, Batches(split, 16, seed=0), objective, pruner, fabric=fabric, **options)
    state = {"scores": [score.detach() for score in pruner.scores], "quotas": pruner.quotas.detach()}
    state |= {"model": dict(model.state_dict()), "masks": fitted.masks, "history": fitted.history}
    torch.save(state, f"{out}.{fabric.global_rank}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
