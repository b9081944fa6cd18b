"""What ANP-VS's pre-processing hides: one network trained and attacked as its authors do, one as everyone else does.

Three numbers a seed, on the part of Fashion-MNIST that comes with the package:

- `claimed`: trained on standardised images, and attacked as the authors do: their PGD clips standardised images to
  [0, 1], so it can't move most pixels.
- `honest`: the same network, attacked on the images themselves.
- `rescaled`: trained and attacked on images in [0, 1].

The paper has 57.3 % for the first and 31.1 % for the last, for VGG16 on CIFAR-10 under PGD-40.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.terminal import Parser, positive, say

import harp
from harp.data.dataset import DataSet
from harp.pruning.methods.anp import CrippledPgd, Standardised, standardise

EPSILON, STEP = 0.1, 0.01


def main(arguments: list[str] | None = None) -> int:
    """Train both networks for each seed, print a line for each and the JSON object."""
    options = _parser().parse_args(arguments)
    seeds = range(options.seed, options.seed + options.seeds)
    rows = [measured(seed, options) for seed in seeds]
    means = {name: round(mean(row[name] for row in rows), 4) for name in rows[0] if name != "seed"}
    setting = {"epsilon": EPSILON, "norm": "linf", "attack": "pgd-40", "examples": options.examples, "data": "fashion"}
    versions = {"harp": harp.__version__, "torch": torch.__version__}
    print(json.dumps({"mean": means, "seeds": rows, **setting, "epochs": options.epochs, "versions": versions}))
    return 0


def measured(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The accuracies of both networks of one seed."""
    data = harp.load_data("fashion")
    test = data.test.select(torch.arange(min(options.examples, len(data.test))).numpy())
    images, labels = test.images.float() / 255, test.labels
    theirs = trained(data, seed, options.epochs, standardised=True)
    plain = trained(data, seed, options.epochs, standardised=False)
    wrapped, crippled, pgd = Standardised(theirs), CrippledPgd(EPSILON, STEP, 40), harp.Pgd(EPSILON, STEP, steps=40)
    found = {
        "natural_standardised": harp.accuracy(wrapped, images, labels),
        "claimed": harp.accuracy(theirs, standardise(images), labels, attack=crippled),
        "honest": harp.accuracy(wrapped, images, labels, attack=pgd),
        "natural_rescaled": harp.accuracy(plain, images, labels),
        "rescaled": harp.accuracy(plain, images, labels, attack=pgd),
    }
    row = {name: round(score.accuracy, 4) for name, score in found.items()}
    say(f"seed {seed}: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in row.items()))
    return {"seed": seed, **row}


def trained(data: DataSet, seed: int, epochs: int, *, standardised: bool) -> torch.nn.Module:
    """A network trained by ANP-VS without a budget: its masks decide."""
    torch.manual_seed(seed)
    model = harp.build_model("tinynet", num_classes=data.num_classes, shape=data.shape, width=12)
    batches = harp.Batches(data.train, 64, seed=seed, augment=harp.Augment(pad=2))
    objective = harp.PgdTraining(epsilon=EPSILON, step=0.05, steps=3)
    pruner = harp.AnpVs(harp.Weights(model), standardised=standardised)
    report = lambda record: say(f"  seed {seed}, epoch {record['epoch']}/{epochs}")  # noqa: E731
    harp.fit(model, batches, objective, pruner, epochs=epochs, lr=0.05, seed=seed, on_epoch=report)
    return model.eval()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=positive, default=10, help="of each training")
    parser.add_argument("--examples", type=positive, default=1000, help="test images")
    parser.add_argument("--seed", type=positive, default=301, help="the first seed")
    parser.add_argument("--seeds", type=positive, default=3, help="how many seeds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
