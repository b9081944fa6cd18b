"""Golden runs: fifty seeded steps of every method. `python -m tests.golden` writes them anew; review the difference.

In float64, so that another processor's rounding does not show: only a change of the algorithm does.
"""

import json
from pathlib import Path

from torch import nn

from harp.objectives import PgdTraining
from harp.pruners import PRUNERS
from harp.training import fit
from tests import cases
from tests.test_pruners import make

FILE = Path(__file__).parent / "golden.json"


class FiveBatches:
    """Five batches an epoch, in float64."""

    def __len__(self) -> int:
        return 5

    def __call__(self, epoch: int, start: int = 0) -> object:
        batches = (cases.batch(seed=5 * epoch + index) for index in range(start, 5))
        return ((x.double(), y) for x, y in batches)


def curve(method: str) -> list[float]:
    """The loss of every epoch."""
    model = cases.build("residual").double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    pruner = make(method, model)
    history = fit(model, FiveBatches(), PgdTraining(steps=2), pruner, epochs=10, lr=0.05).history
    return [record["loss"] for record in history]


if __name__ == "__main__":
    FILE.write_text(json.dumps({method: curve(method) for method in sorted(PRUNERS)}, indent=1) + "\n")
