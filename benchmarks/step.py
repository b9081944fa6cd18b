"""One HARP pruning step: ours, the papers' to the letter, and the same passes through a plain dense network.

The variants take turns in one process, each on its own copy of the network, with the same images and random numbers:

ours   the objective (PGD, then the loss), backward, pull-back to scores and quotas, optimiser step, weights written.
twin   the published step: masked layers that sort their scores in every forward pass, PGD in eval mode through them
       with the gradient of the images only, then a forward and backward pass in train mode with the budget loss,
       and the optimiser step. The published code makes one more forward pass, of the clean images, whose answers it
       only logs; it is left out unless asked for, which is in the twin's favour.
floor  the dense network as it is, no pruning: per attack step a forward pass in eval mode and the gradient of the
       images, then a forward and backward pass in train mode. No masks, no projection, no optimiser.
"""

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The twin is the one that the tests hold the product against: it lives in the tests, which are no installed package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

from benchmarks.terminal import Parser, positive, progress, say
from benchmarks.timing import Times, cpu_name, interleaved, load

from harp import models
from harp.attacks import Pgd
from harp.errors import HarpError, ModelError
from harp.pruning.methods import Harp
from harp.pruning.units import Weights
from harp.training.objectives import PgdTraining
from support.reference import Masked, SortedMask, Twin

KEEP = 0.01
SHAPE = (3, 32, 32)
CLASSES = 10
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}  # the papers'

Step = Callable[[int], float]  # from the number of attack steps to the loss


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.clock = options.clock or ("cpu" if options.threads == 1 else "wall")
    torch.set_num_threads(options.threads)
    try:
        result = measure(options)
    except HarpError as error:
        print(f"step.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Build the variants, warm them up, time them, print the table; return the JSON object."""
    torch.manual_seed(0)
    model = _network(options.model, options.width)
    batch = torch.rand(options.batch, *SHAPE), torch.randint(CLASSES, (options.batch,))
    say(f"{options.model}: batch {options.batch}, PGD-{options.steps}, {options.threads} thread(s), one warm-up each")
    _calibrate(model, options.batch)
    pruner = Harp(Weights(model), KEEP, published=True)
    twin = _twin(model, pruner)
    steps: dict[str, Step] = {
        "ours": ours(model, pruner, batch),
        "twin": published(twin, pruner.gamma, batch, options.authors_clean_forward),
        "floor": dense(copy.deepcopy(model), batch),  # before the pruner has written: all weights
    }
    pruner.start()
    losses: dict[str, float] = {}
    for name, step in steps.items():
        losses[name] = step(1)

    def variant(name: str) -> Callable[[], None]:
        return lambda: losses.update({name: steps[name](options.steps)})

    times = interleaved({name: variant(name) for name in steps}, options.repeats, progress(options.repeats))
    medians = {name: {clock: times[name].median(clock) for clock in ("cpu", "wall")} for name in times}
    _table(times, options)
    clock = options.clock
    return {
        "benchmark": "step",
        "model": options.model,
        "width": options.width,
        "batch": options.batch,
        "steps": options.steps,
        "keep": KEEP,
        "threads": options.threads,
        "repeats": options.repeats,
        "authors_clean_forward": options.authors_clean_forward,
        "metric": f"{clock}_seconds",
        **{f"{name}_seconds": round(medians[name][clock], 4) for name in medians},
        "speedup_vs_twin": round(_ratio(medians, "twin", "ours", clock), 3),
        "ratio_to_floor": round(_ratio(medians, "ours", "floor", clock), 3),
        "cpu_seconds": {name: [round(t, 4) for t in times[name].cpu] for name in times},
        "wall_seconds": {name: [round(t, 4) for t in times[name].wall] for name in times},
        "speedup_vs_twin_wall": round(_ratio(medians, "twin", "ours", "wall"), 3),
        "ratio_to_floor_wall": round(_ratio(medians, "ours", "floor", "wall"), 3),
        "ours_loss": losses["ours"],
        "twin_loss": losses["twin"],
        "equal_mask_entries": round(_agreement(pruner, twin), 6),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": load(),
    }


def ours(model: nn.Module, pruner: Harp, batch: tuple[Tensor, Tensor]) -> Step:
    """The product's step, as `harp.training.loop` makes it."""
    optimizer = torch.optim.SGD(pruner.trainable(), **SGD)
    count = _Counter()

    def step(attack_steps: int) -> float:
        torch.manual_seed(count())
        optimizer.zero_grad()
        loss = PgdTraining(steps=attack_steps)(model, *batch)
        loss.backward()
        pruner.after_backward()
        optimizer.step()
        pruner.after_step()
        return loss.item()

    return step


def published(twin: Twin, gamma: float, batch: tuple[Tensor, Tensor], clean_forward: bool) -> Step:
    """The published step through the layers that sort; the loss is given without the budget's."""
    optimizer = torch.optim.SGD(twin.parameters(), **SGD)
    count = _Counter()
    x, y = batch

    def step(attack_steps: int) -> float:
        torch.manual_seed(count())
        if clean_forward:
            twin.model(x)
        attacked = Pgd(steps=attack_steps, fast=False)(twin.model, x, y)
        loss = F.cross_entropy(twin.model(attacked), y)
        optimizer.zero_grad()
        (loss + gamma * twin.budget_loss()).backward()
        optimizer.step()
        return loss.item()

    return step


def dense(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """The floor: the same passes through the plain network."""
    x, y = batch
    images = x.clone().requires_grad_(True)

    def step(attack_steps: int) -> float:
        model.eval()
        for _ in range(attack_steps):
            torch.autograd.grad(F.cross_entropy(model(images), y), images)
        model.train()
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    return step


class _Counter:
    """0, 1, 2, ...: the seed of each step, the same for every variant."""

    def __init__(self) -> None:
        self.next = -1

    def __call__(self) -> int:
        self.next += 1
        return self.next


def _network(name: str, width: float | None) -> nn.Module:
    """The network for images of CIFAR's shape; the twin knows convolutions and linear layers only."""
    options = {} if width is None else {"width": int(width) if width.is_integer() else width}
    model = models.build(name, num_classes=CLASSES, shape=SHAPE, **options)
    other = set(Weights(model).names) - {
        f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)
    }
    if other:
        raise ModelError(f"{name!r} has weights that the published step does not mask, such as {min(other)!r}")
    return model.train()


@torch.no_grad()
def _calibrate(model: nn.Module, batch: int) -> None:
    """Give the batch norms statistics: at their start an eval-mode network is another function."""
    for _ in range(3):
        model(torch.rand(batch, *SHAPE))


def _twin(model: nn.Module, pruner: Harp) -> Twin:
    """The twin of the pruner: the same network, budget and quotas."""
    twin = Twin(model, KEEP)
    twin.total = pruner.total
    with torch.no_grad():
        for layer, quota in zip(twin.layers.values(), pruner.quotas, strict=True):
            layer.quota.copy_(quota)
    return twin


@torch.no_grad()
def _agreement(pruner: Harp, twin: Twin) -> float:
    """The share of mask entries that both variants have come to; they differ by rounding in the attack's signs only."""
    pairs = [(mask, _mask(layer)) for mask, layer in zip(pruner.current().values(), twin.layers.values(), strict=True)]
    equal = sum(int((ours == theirs).sum()) for ours, theirs in pairs)
    return equal / sum(mask.numel() for mask, _ in pairs)


def _mask(layer: Masked) -> Tensor:
    mask: Tensor = SortedMask.apply(layer.scores.abs(), layer.density())
    return mask.bool()


def _ratio(medians: dict[str, dict[str, float]], above: str, below: str, clock: str) -> float:
    return medians[above][clock] / medians[below][clock]


def _table(times: dict[str, Times], options: argparse.Namespace) -> None:
    about = {
        "ours": "this library",
        "twin": "the published step" + (", clean forward too" if options.authors_clean_forward else ""),
        "floor": "the dense network",
    }
    print(f"{'way':<6} {'cpu s':>8} {'spread':>7} {'wall s':>8} {'spread':>7}  what")
    for name, taken in times.items():
        numbers = [f"{taken.median(c):8.3f} {taken.spread(c):7.0%}" for c in ("cpu", "wall")]
        print(f"{name:<6} {' '.join(numbers)}  {about[name]}")
    for clock in ("cpu", "wall"):
        medians = {name: {clock: taken.median(clock)} for name, taken in times.items()}
        faster, share = _ratio(medians, "twin", "ours", clock), _ratio(medians, "ours", "floor", clock)
        print(f"by {clock + ' time':<9}: x{faster:.2f} faster than the published step, {share:.2f} of the floor")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="step.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A table and, as the last line of standard output, one JSON object; progress goes to standard error.\n"
        "Example: python benchmarks/step.py --model vgg16 --batch 128 --repeats 3\n"
        "Quick:   python benchmarks/step.py --model vgg8 --batch 16 --steps 2 --width 0.25",
    )
    parser.add_argument("--model", required=True, help="a name (`harp list models`) or path/to/file.py:function")
    parser.add_argument("--batch", required=True, type=positive, help="images a step; the papers train with 128")
    parser.add_argument("--steps", default=10, type=positive, help="steps of the attack (default: 10)")
    parser.add_argument("--repeats", default=3, type=positive, help="how often each variant is timed (default: 3)")
    parser.add_argument(
        "--threads",
        default=torch.get_num_threads(),
        type=positive,
        help="of torch (default: all, as in a training; torch.sort never uses more than one)",
    )
    parser.add_argument("--width", type=_width, help="the network's width multiplier (tinynet, convnet: channels)")
    parser.add_argument(
        "--clock",
        choices=("cpu", "wall"),
        help="what the headline is measured by (default: cpu with one thread, since other programs disturb it least; "
        "wall with several, since CPU time does not show what they are worth)",
    )
    parser.add_argument(
        "--authors-clean-forward",
        action="store_true",
        help="let the twin also make the published code's forward pass of the clean images",
    )
    return parser


def _width(text: str) -> float:
    try:
        width = float(text)
    except ValueError:
        width = math.nan
    if not 0 < width < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return width


if __name__ == "__main__":
    sys.exit(main())
