"""A few real steps at ImageNet's size: ResNet50, 224 x 224 pixels, 1,000 classes, Free-AT, HARP, fine-tuning.

Random images, the paper's settings (epsilon 4/255, 4 replays, γ grows by 0.1 an epoch, 1 % kept, weight decay 1e-4,
normalisation inside the model); what is scaled down is the batch and the number of batches. Every update is timed.
Checked, not just shown: each loss is finite, the budget loss is max(Σ a n / (a_t N) - 1, 0) by a count of its own, γ is
0.1 times the epoch, and the pruned network keeps exactly its budget.
"""

import argparse
import itertools
import json
import math
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.terminal import Parser, positive, say
from benchmarks.timing import cpu_name, load

from harp import models
from harp.errors import HarpError
from harp.experiments import compose
from harp.pruning.methods import Dense, Fixed, Harp, Pruner
from harp.pruning.units import Weights
from harp.training.free_at import FreeTraining
from harp.training.loop import fit

RECIPE = "imagenet/resnet50/harp-free-99"
KEEP, STEP, EPOCHS = 0.01, 0.1, 2


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the JSON object."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        print(json.dumps(measure(options)))
    except HarpError as error:
        print(f"large.py: {error}", file=sys.stderr)
        return 2
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Pre-train, prune and fine-tune for a few batches each; return the JSON object."""
    torch.manual_seed(0)
    shape = (3, options.size, options.size)
    normalize = compose.load(RECIPE).model.normalize
    model = models.build("resnet50", num_classes=1000, shape=shape, normalize=normalize)
    batches = [
        (torch.rand(options.batch, *shape), torch.randint(1000, (options.batch,))) for _ in range(options.batches)
    ]
    result: dict[str, Any] = {"benchmark": "large", "model": "resnet50", "size": options.size, "batch": options.batch}
    result |= {"batches": options.batches, "replays": options.replays, "threads": options.threads}
    free = FreeTraining(epsilon=4 / 255, replays=options.replays, fresh=True)
    result["pretrain"], _ = _stage("pretrain", model, batches, free, Dense(Weights(model)), 0.1, options)
    pruner = Harp(Weights(model), keep=KEEP, published=True, gamma_step=STEP)
    result["prune"], masks = _stage("prune", model, batches, free, pruner, 0.1, options)
    result["prune"] |= _checked(pruner, result["prune"].pop("records"))
    result["pretrain"].pop("records")
    result["finetune"], masks = _stage("finetune", model, batches, free, Fixed(Weights(model), masks), 0.01, options)
    result["finetune"].pop("records")
    kept = sum(int(mask.sum()) for mask in masks.values())
    if kept != pruner.total:
        raise SystemExit(f"large.py: {kept} weights are kept instead of {pruner.total}")
    return result | {
        "kept": kept,
        "of": pruner.units.size,
        "cpu": cpu_name(),
        "load": load(),
        "torch": torch.__version__,
    }


def _stage(
    name: str,
    model: torch.nn.Module,
    batches: list[Any],
    objective: FreeTraining,
    pruner: Pruner,
    lr: float,
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train for a few batches, and say what an update took and how large the process was."""
    marks, records = [time.perf_counter()], []

    def on_step(record: dict[str, Any]) -> None:
        marks.append(time.perf_counter())
        records.append(record)
        seconds = (marks[-1] - marks[-2]) / options.replays
        say(f"  {name:<8} batch {len(records)}/{EPOCHS * len(batches)}  {seconds:6.2f} s an update")

    fitted = fit(model, batches, objective, pruner, epochs=EPOCHS, lr=lr, weight_decay=1e-4, on_step=on_step)
    losses = [record["loss"] for record in records]
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"large.py: {name} has a loss that is not finite: {losses}")
    gaps = [(after - before) / options.replays for before, after in itertools.pairwise(marks)]
    result = {
        "seconds_an_update": round(statistics.median(gaps), 3),
        "seconds_an_image": round(statistics.median(gaps) / options.batch, 4),
        "losses": [round(loss, 4) for loss in losses],
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "records": records,
    }
    return result, fitted.masks


def _checked(pruner: Harp, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The budget loss and γ of every batch, after comparing them with the paper's formulas."""
    sizes, rates = pruner.units.sizes, pruner.rates().detach().tolist()
    by_hand = max(sum(a * n for a, n in zip(rates, sizes, strict=True)) / (KEEP * sum(sizes)) - 1, 0.0)
    reported = float(pruner.budget_loss().detach())
    if abs(by_hand - reported) > 1e-4 * max(1.0, reported):  # the budget is a whole number of weights
        raise SystemExit(f"large.py: the budget loss is {reported}, the paper's formula gives {by_hand}")
    gammas = [record["gamma"] for record in records]
    expected = [STEP * (1 + record["epoch"]) for record in records]
    if any(abs(a - b) > 1e-9 for a, b in zip(gammas, expected, strict=True)):
        raise SystemExit(f"large.py: gamma is {gammas}, expected {expected}")
    return {"budget_losses": [round(record["budget_loss"], 4) for record in records], "gammas": gammas}


def _parser() -> Parser:
    parser = Parser(prog="large.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=positive, default=16, help="images a batch (the paper: 256)")
    parser.add_argument("--batches", type=positive, default=2, help="batches an epoch, of which there are two a stage")
    parser.add_argument("--replays", type=positive, default=4, help="updates a batch")
    parser.add_argument("--size", type=positive, default=224, help="side of the images in pixels")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="threads of torch")
    return parser


if __name__ == "__main__":
    sys.exit(main())
