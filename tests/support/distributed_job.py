"""Small trainings, one after the other, that `test_distributed` runs in some processes.

    distributed_job.py OUT DEVICES ACCUMULATE STOP METHOD[/OBJECTIVE[/apart]] ...

The objective is PGD unless named; `apart`: batch norms take the statistics of each process's own images. STOP is the
number of a batch in the second epoch after which the training of each method is stopped and saved beside OUT, or 0 to
go on from there to the end.

Each process leaves a file: by each of these words the answer, the model, the pruner's state, the budget and which
images are right under attack.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp.attacks import Apgd, Pgd
from harp.data.batches import Batches
from harp.data.dataset import Split
from harp.errors import Interrupted
from harp.evaluation.runner import AttackRun
from harp.pruning.methods import PRUNERS
from harp.pruning.units import Weights
from harp.system.distributed.fabric import launch
from harp.system.distributed.peers import of_this_run
from harp.system.interrupt import Stop
from harp.training.checkpointing import Keeper
from harp.training.free_at import FreeTraining
from harp.training.loop import fit
from harp.training.objectives import FastTraining, Natural, PgdTraining, Trades

# 'fixed' is what the one-shot methods are once they have their masks.
METHODS: dict[str, dict[str, Any]] = {name: {"keep": 0.05} for name in PRUNERS if name not in ("dense", "fixed")}
METHODS |= {
    "dense": {},
    "hydra, sharpness": {"keep": 0.05, "sharpness": 0.5},
    # The defaults pace themselves by long trainings: these act in a few steps.
    "mad": {"keep": 0.05, "mask_steps": 3},
    "r-admm": {"keep": 0.05, "rho": 0.1, "period": 1},
    "flying-bird": {"keep": 0.05, "interval": 2},
    # With more kept no channel is without weights: all its places would be worth the same, and rounding would choose.
    "flying-bird+": {"keep": 0.2, "interval": 1, "window": 1, "prune_ratio": 0.0, "growth_ratio": 1.0},
}


OBJECTIVES: dict[str, Any] = {
    "natural": Natural(),
    "pgd": PgdTraining(epsilon=0.1, step=0.05, steps=2),
    "free": FreeTraining(epsilon=0.1, replays=2),
    "trades": Trades(epsilon=0.1, step=0.05, steps=2),
    "fast": FastTraining(epsilon=0.1),
}


class Double(nn.Module):
    """So that the order of a sum, which is another in two processes, does not decide between two weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class _Shifted:
    """A channel without weights is its batch norm's shift: at zero, rounding would decide on its side of a ReLU."""

    def reset_parameters(self: Any) -> None:
        super().reset_parameters()  # type: ignore[misc]
        nn.init.uniform_(self.bias, -0.5, 0.5)


class Shifted1d(_Shifted, nn.BatchNorm1d):
    pass


class Shifted2d(_Shifted, nn.BatchNorm2d):
    pass


def network() -> nn.Module:
    torch.manual_seed(0)
    linear = [nn.Flatten(), nn.Linear(8 * 9, 16), Shifted1d(16), nn.ReLU(), nn.Linear(16, 4)]
    return nn.Sequential(Double(), nn.Conv2d(1, 8, 3, stride=2), Shifted2d(8), nn.ReLU(), *linear).double()


def train(fabric: Any, word: str, accumulate: int, keeper: Keeper, stop_at: int) -> dict[str, Any]:
    method, _, rest = word.partition("/")
    objective, _, apart = rest.partition("/")

    def on_step(record: dict[str, Any]) -> None:
        if stop_at and (record["epoch"], record["step"]) == (1, stop_at):
            keeper.stop.signal = signal.SIGTERM

    model = network()
    if fabric.global_rank == 1:
        with torch.no_grad():
            model[1].weight.mul_(3)  # a rank that starts elsewhere must be brought in line
            model[2].running_mean.add_(1)
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    split = Split(images, torch.arange(64) % 4)
    pruner = PRUNERS[method.partition(",")[0]](Weights(model), **METHODS[method])
    validated = iter([0.5, 0.4, 0.3])  # it gets worse, which Flying Bird+ acts on
    fitted = fit(
        model,
        Batches(split, 16, seed=0),
        OBJECTIVES[objective or "pgd"],
        pruner,
        epochs=3,
        lr=0.1,
        accumulate=accumulate,
        validate=lambda: {"robust": next(validated)},
        on_step=on_step,
        keeper=keeper,
        sync_norms=not apart,
        fabric=fabric,
    )
    state = {"model": dict(model.state_dict()), "pruner": dict(pruner.state_dict())}
    right = [attacked(model, split, attack) for attack in (Pgd(0.1, steps=2), Apgd(0.1, steps=4))]
    losses = [record["loss"] for record in fitted.history]
    return {"masks": fitted.masks, "total": pruner.total, "losses": losses, "right": right, **state}


def attacked(model: nn.Module, split: Split, attack: Any) -> Tensor:
    """Which images all processes together find right under attack."""
    how: dict[str, Any] = {"classes": 4, "batch": 8, "peers": of_this_run()}
    return AttackRun(model, split.images, split.labels, attack, **how).run().right


def main(out: str, devices: int, accumulate: int, stop_at: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    fabric = launch("32-true", "cpu", devices)
    found = {}
    for word in words:
        # With 0 minutes processes ask each other after every step, so that they stop where they are told to.
        often = 0.0 if stop_at else 60.0
        keeper = Keeper(Path(f"{out}.{word.replace('/', '-')}.state"), Stop(), minutes=often, fabric=fabric)
        try:
            found[word] = train(fabric, word, accumulate, keeper, stop_at)
        except Interrupted:
            continue
    torch.save(found, f"{out}.{fabric.global_rank}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5:])
