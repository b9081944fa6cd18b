"""Trainings in two processes, for `tests/training/test_processes.py`: each process writes what it ends with.

training_job.py OUT DEVICES
"""

import sys
from typing import Any

import torch
from torch import nn

from harp.data.batches import Batches
from harp.data.dataset import Split
from harp.errors import ModelError
from harp.pruning.masks import Masks
from harp.pruning.methods import Dense, Mad, Magnitude, Pruner
from harp.pruning.units import Weights
from harp.system.distributed.fabric import launch
from harp.training.loop import fit
from harp.training.objectives import Natural


class Differing(Dense):
    """Masks that are not the same in every process."""

    rank = 0

    def masks(self) -> Masks:
        return {name: mask & (self.rank == 0) for name, mask in super().masks().items()}


def network(rank: int) -> nn.Module:
    """Process 1 has other weights and statistics: the training must start from those of process 0."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    if rank == 1:
        with torch.no_grad():
            model[1].weight.mul_(3)
            model[2].running_mean.add_(1)
    return model


def trained(fabric: Any, kind: type[Pruner], **options: Any) -> dict[str, Any]:
    """The weights, the pruner's state and the losses after two epochs."""
    model = network(fabric.global_rank)
    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    batches = Batches(Split(images, torch.arange(32) % 4), 16, seed=0)
    pruner = kind(Weights(model), **options)
    fitted = fit(model, batches, Natural(), pruner, epochs=2, lr=0.1, fabric=fabric)
    losses = [record["loss"] for record in fitted.history]
    return {"model": dict(model.state_dict()), "pruner": dict(pruner.state_dict()), "losses": losses}


def main() -> None:
    torch.set_num_threads(1)
    fabric = launch("32-true", "cpu", int(sys.argv[2]))
    results: dict[str, Any] = {
        "magnitude": trained(fabric, Magnitude, keep=0.5),
        "mad": trained(fabric, Mad, keep=0.5, mask_steps=2),
    }
    Differing.rank = fabric.global_rank
    try:
        trained(fabric, Differing)
    except ModelError as error:
        results["differing"] = str(error)
    torch.save(results, f"{sys.argv[1]}.{fabric.global_rank}")


if __name__ == "__main__":
    main()
