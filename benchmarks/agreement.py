"""AutoAttack: ours and the pyautoattack package, image by image, on networks of 2 to 100 classes.

Every network is a small one, trained against PGD for a minute or less on embedded images: two, four or all ten classes
of Fashion-MNIST, and pairs of digits side by side, 100 classes. Both attacks are the standard ensemble at full length.
Images that only one of them fools are counted for both; a second seed of the package shows what randomness alone does.
The package has no targeted APGD for two classes and tries too many targets with fewer than ten: it is given the right
number.
"""

import argparse
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harp
from harp import models
from harp.attacks import AutoAttack
from harp.data import registry
from harp.data.batches import Batches
from harp.data.dataset import Split
from harp.evaluation.score import accuracy, subset
from harp.pruning.methods import Dense
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import PgdTraining

EPSILON = 0.1
CASES = [
    ("tinynet", {"width": 8}, 2),
    ("resnet8", {"width": 0.25}, 2),
    ("tinynet", {"width": 8}, 4),
    ("resnet8", {"width": 0.25}, 4),
    ("tinynet", {"width": 8}, 10),
    ("resnet8", {"width": 0.25}, 10),
    ("tinynet", {"width": 8}, 100),
    ("resnet8", {"width": 0.25}, 100),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", default=40, type=int, help="test images of each network (default: 40)")
    parser.add_argument("--norm", default="linf", choices=("linf", "l2"), help="of the ball (default: linf)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    head = ("network", "classes", "natural", "ours", "theirs", "only ours", "only theirs", "their seeds")
    print("{:<9}{:>8}{:>9}{:>8}{:>8}{:>11}{:>13}{:>13}".format(*head), flush=True)
    for name, settings, classes in CASES:
        row = compare(name, settings, classes, options.examples, options.norm)
        print(
            f"{name:<9}{classes:>8}{row['natural']:>9.1%}{row['robust_ours']:>8.1%}{row['robust_theirs']:>8.1%}"
            f"{row['fooled_by_ours_only']:>11}{row['fooled_by_theirs_only']:>13}{row['differ_between_their_seeds']:>13}",
            flush=True,
        )
        rows.append(row)
    names = ("pyautoattack", "torch")
    versions = {
        "harp": harp.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }
    print(json.dumps({"benchmark": "agreement", "norm": options.norm, "rows": rows, "versions": versions}))
    return 0


def compare(name: str, settings: dict[str, Any], classes: int, examples: int, norm: str) -> dict[str, Any]:
    """Train a network and let both attack it."""
    train, test = images(classes)
    torch.manual_seed(0)
    model = models.build(name, num_classes=classes, shape=tuple(train.images.shape[1:]), **settings)  # type: ignore[arg-type]  # three numbers
    epochs = max(4, 20_000 // len(train))
    fit(model, Batches(train, 64), PgdTraining(epsilon=EPSILON, steps=4), Dense(Weights(model)), epochs=epochs, lr=0.05)
    model.eval()
    epsilon = EPSILON if norm == "linf" else 1.0
    chosen = test.select(subset(len(test), examples, 0))
    x, y = chosen.images.float() / 255, chosen.labels
    natural = accuracy(model, x, y).accuracy
    torch.manual_seed(0)
    ours = right(model, AutoAttack(epsilon, norm)(model, x, y), y)
    first, second = (theirs(model, x, y, classes, epsilon, norm, seed) for seed in (0, 1))
    return {
        "network": name,
        **settings,
        "classes": classes,
        "epsilon": epsilon,
        "n": len(x),
        "natural": natural,
        "robust_ours": float(ours.float().mean()),
        "robust_theirs": float(first.float().mean()),
        "fooled_by_ours_only": int((first & ~ours).sum()),
        "fooled_by_theirs_only": int((ours & ~first).sum()),
        "differ_between_their_seeds": int((first != second).sum()),
    }


def theirs(model: nn.Module, x: Tensor, y: Tensor, classes: int, epsilon: float, norm: str, seed: int) -> Tensor:
    """Which images hold out against the package."""
    import pyautoattack

    written = {"linf": "Linf", "l2": "L2"}[norm]
    adversary = pyautoattack.AutoAttack(model, norm=written, eps=epsilon, seed=seed)
    for attack in (adversary.apgd_targeted, adversary.fab):
        attack.n_target_classes = min(9, classes - 1)
    if classes < 4:
        adversary.attacks_to_run = [part for part in adversary.attacks_to_run if part != "apgd-t"]
    return right(model, adversary.run_standard_evaluation(x, y, batch_size=250)[0], y)


@torch.no_grad()
def right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Which images the model gets right."""
    right: Tensor = model(x).argmax(1) == y
    return right


def images(classes: int) -> tuple[Split, Split]:
    """Images of so many classes, to train and to test on."""
    source = registry.load("digits" if classes == 100 else "fashion")
    if classes == 100:
        return pairs(source.train, 6000), pairs(source.test, 500)
    parts = (source.train, source.test)
    train, test = (part.select((part.labels < classes).nonzero().flatten()) for part in parts)
    return train, test


def pairs(split: Split, count: int) -> Split:
    """Two digits side by side, drawn at random: a number from 0 to 99."""
    left, right = torch.randint(len(split), (2, count), generator=torch.Generator().manual_seed(0))
    joined = torch.cat([split.images[left], split.images[right]], 3)
    return Split(joined, 10 * split.labels[left] + split.labels[right])


if __name__ == "__main__":
    sys.exit(main())
