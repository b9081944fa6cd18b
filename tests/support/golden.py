"""Golden runs: fifty seeded steps of every method.

`PYTHONPATH=tests python -m support.golden` records all anew, with names after it only these; review the difference.

In float64, so that another processor's rounding does not show: only a change of the algorithm does.
"""

import json
import sys

from torch import nn

from harp.pruning.methods import PRUNERS
from harp.training.loop import fit
from harp.training.objectives import PgdTraining
from support import cases
from support.methods import VARIANTS, make
from support.paths import SUPPORT

FILE = SUPPORT / "golden.json"
METHODS = [*sorted(PRUNERS), *VARIANTS]


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
    names = sys.argv[1:]
    curves = json.loads(FILE.read_text()) if names else {}
    curves |= {method: curve(method) for method in names or METHODS}
    FILE.write_text(json.dumps(curves, indent=1, sort_keys=True) + "\n")
