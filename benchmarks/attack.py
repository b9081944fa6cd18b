"""What attacking and fine-tuning a pruned network cost: with the sparse engine, and with the optimised dense pass.

The network has random weights and random masks with the counts of a strategy (see pruned.py). Both variants are this
library's own, the engine switched on and off; dense means
`harp.attacks.fast_forward`: batch norms folded, the faster memory layout.

pass        logits and the gradient of the cross entropy with respect to the images: what every step of an attack takes
evaluation  `harp.accuracy` under PGD-10: the attack, and the classes of its images, which the plain model computes in
            both variants: a dense pass that no engine makes faster
step        a step of `harp.fit` under fixed masks with PGD-10, train-mode batch norms and the optimiser included. The
            first step of a training is left out: it finds out what the network computes.

The variants take turns in one process; medians are compared, by CPU time with one thread, else by the wall clock.

agreement   Attacks follow signs of gradients, and rounding flips some. So on a small network that is trained and pruned
            here, on the embedded Fashion images, the two are compared: pixels after one step and after ten from the
            same start, the loss of the images (by the plain model), robust accuracy. `control` is the same between two
            dense variants, the folded network and the model as it is, which differ by rounding and layout alone.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pruned import CLASSES, SHAPE, add_arguments, pruned, width_option
from benchmarks.switch import engine
from benchmarks.terminal import Parser, positive, say
from benchmarks.timing import Times, cpu_name, interleaved, load

import harp
from harp import models
from harp.attacks import Ball, Pgd, ascend
from harp.attacks.fast_forward import frozen
from harp.data import registry
from harp.data.batches import Batches
from harp.engine.follower import Follower
from harp.engine.native import bindings
from harp.errors import HarpError, ModelError
from harp.evaluation.score import accuracy, subset
from harp.models.modes import Logits
from harp.pruning import macs
from harp.pruning.masks import Masks
from harp.pruning.masks import kept as kept_weights
from harp.pruning.methods import Dense, Fixed, Lamp
from harp.pruning.units import Weights
from harp.system.seeds import derive
from harp.training.loop import fit
from harp.training.objectives import PgdTraining

STEPS = 10
EPSILON = 0.1  # of the trained network
PARTS = ("pass", "evaluation", "step", "agreement")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and the JSON object."""
    options = _parser().parse_args(arguments)
    options.clock = "cpu" if options.threads == 1 else "wall"
    torch.set_num_threads(options.threads)
    try:
        if bindings.kernels() is None:
            raise ModelError("this installation has no native code for this machine: there is no engine to measure")
        result = measure(options)
    except HarpError as error:
        print(f"attack.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts; return the JSON object."""
    model, masks = pruned(options.model, options.keep, options.strategy, width=options.width, seed=options.seed)
    say(f"{options.model}: {kept_weights(masks):,} weights, {options.strategy}, batch {options.batch}")
    generator = torch.Generator().manual_seed(derive(options.seed, "images"))
    x = torch.rand(options.batch, *SHAPE, generator=generator)
    y = torch.randint(CLASSES, (options.batch,), generator=generator)
    with frozen(model, x) as net:
        chosen = isinstance(net, Follower)
    if not chosen:
        say("attacks do not choose the engine for this network; the pass is measured with it all the same")
    result = _facts(options, model, masks) | {"frozen_takes_engine": chosen}
    if "pass" in options.parts:
        result |= passes(model, x, y, options)
    if "evaluation" in options.parts:
        result |= evaluations(model, x, y, options)
    if "step" in options.parts:
        result |= steps(model, masks, x, y, options)
    if "agreement" in options.parts:
        result["agreement"] = agreement(options)
    return result


def followed(model: nn.Module, x: Tensor) -> Logits:
    """The engine with the weights of a model in eval mode."""
    follower = Follower(model, x[:2])
    follower.follow(model)
    return follower


def passes(model: nn.Module, x: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """One attack pass, both variants."""
    with ExitStack() as stack:
        stack.enter_context(engine(on=False))
        nets = {"engine": followed(model, x), "dense": stack.enter_context(frozen(model, x))}
        last: dict[str, Tensor] = {}

        def variant(name: str) -> None:
            last[name] = gradient(nets[name], x, y)

        variants = {name: partial(variant, name) for name in nets}
        for warm_up in variants.values():
            warm_up()
        times = interleaved(variants, options.repeats)
        with torch.no_grad():
            logits = {name: net(x) for name, net in nets.items()}
    apart = _error(last["engine"], last["dense"])  # of the last turn: what is used again must still be right
    off = float((logits["engine"] - logits["dense"]).abs().max() / logits["dense"].abs().max())
    errors = {"max_relative_error": off, "median_gradient_error": apart}
    return _compared("attack", "pass", times, options) | errors


def gradient(net: Logits, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the summed cross entropy with respect to the images."""
    points = x.detach().requires_grad_(True)
    (gradients,) = torch.autograd.grad(F.cross_entropy(net(points), y, reduction="sum"), points)
    return gradients


def _error(actual: Tensor, expected: Tensor) -> float:
    """The median over the images of the largest difference, relative to the largest number.

    The median, as a ReLU or a maximum whose inputs are equal up to rounding may give another gradient to one image.
    """
    largest = expected.abs().flatten(1).amax(1).clamp_min(1e-30)
    return float(((actual - expected).abs().flatten(1).amax(1) / largest).median())


def evaluations(model: nn.Module, x: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """PGD-10 and the classes of its adversarial images, both variants."""
    attack = Pgd(steps=STEPS)

    def evaluate(on: bool, count: int) -> None:
        with engine(on=on):
            accuracy(model, x[:count], y[:count], attack=attack, batch=count, seed=options.seed, num_classes=CLASSES)

    variants = {name: partial(evaluate, name == "engine", len(x)) for name in ("engine", "dense")}
    for name in variants:
        evaluate(name == "engine", min(16, len(x)))  # the first time takes finding out what the network computes
    return _compared("evaluation", f"PGD-{STEPS}", interleaved(variants, options.repeats), options)


def steps(model: nn.Module, masks: Masks, x: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """A fine-tuning step, both variants, each on its own copy of the network."""
    times = {"engine": Times(), "dense": Times()}
    for repeat in range(options.step_repeats):
        for name in times if repeat % 2 == 0 else reversed(times):
            with engine(on=name == "engine"):
                clocks = _stepped(copy.deepcopy(model).train(), masks, x, y, options)
            for clock in ("cpu", "wall"):
                getattr(times[name], clock).append(clocks[clock])
            say(f"  step {repeat + 1}/{options.step_repeats} {name}: {clocks['wall']:.2f} s")
    return _compared("step", "fine-tuning step", times, options)


def _stepped(model: nn.Module, masks: Masks, x: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """The seconds of the second step of a training."""
    began: list[tuple[float, float]] = []

    def note(record: object) -> None:
        began.append((time.process_time(), time.perf_counter()))

    pruner = Fixed(Weights(model), masks)
    fit(model, [(x, y)] * 2, PgdTraining(steps=STEPS), pruner, epochs=1, lr=0.01, seed=options.seed, on_step=note)
    (cpu, wall), (cpu_after, wall_after) = began
    return {"cpu": cpu_after - cpu, "wall": wall_after - wall}


def _compared(key: str, words: str, times: dict[str, Times], options: argparse.Namespace) -> dict[str, Any]:
    medians = {name: taken.median(options.clock) for name, taken in times.items()}
    faster = medians["dense"] / medians["engine"]
    print(f"{words:<18} {medians['dense']:9.3f} s -> {medians['engine']:9.3f} s  x{faster:6.2f}")
    seconds = {name: [round(t, 5) for t in getattr(taken, options.clock)] for name, taken in times.items()}
    return {f"speedup_{key}": round(faster, 2), f"{key}_seconds": seconds}


def agreement(options: argparse.Namespace) -> dict[str, Any]:
    """How alike the attacks are on a trained network."""
    source = registry.load("fashion")
    model = trained(options, source)
    test = source.test.select(subset(len(source.test), options.agreement_images, options.seed))
    x, y = test.images.float() / 255, test.labels.long()
    ball = Ball(EPSILON, "linf")
    torch.manual_seed(derive(options.seed, "start"))
    start = ball.random(x)
    with engine(on=False), frozen(model, x) as dense:
        nets: dict[str, Logits] = {"dense": dense, "plain": model.eval(), "engine": followed(model, x)}
        attacked = {name: _attacked(net, x, y, start, ball) for name, net in nets.items()}
    losses, robust = {}, {}
    with torch.no_grad():
        for name, (_, last) in attacked.items():
            answer = model(last)
            losses[name], robust[name] = (
                float(F.cross_entropy(answer, y)),
                float((answer.argmax(1) == y).float().mean()),
            )
        natural = float((model(x).argmax(1) == y).float().mean())

    def alike(name: str) -> dict[str, float]:
        one, last = (float((attacked[name][k] == attacked["dense"][k]).float().mean()) for k in (0, 1))
        apart = abs(losses[name] / losses["dense"] - 1)
        return {"equal_pixels_1": one, "equal_pixels_10": last, "loss_difference": apart, "robust": robust[name]}

    result = {"engine": alike("engine"), "control": alike("plain"), "robust_dense": robust["dense"], "natural": natural}
    for name in ("engine", "control"):
        pair: Any = result[name]
        print(
            f"{name:<8} against dense: {pair['equal_pixels_1']:.3%} of the pixels equal after 1 step, "
            f"{pair['equal_pixels_10']:.3%} after {STEPS}; loss {pair['loss_difference']:.1e} apart; "
            f"robust {pair['robust']:.2%}, dense {robust['dense']:.2%}"
        )
    return {"network": options.trained, "n": len(x), "epsilon": EPSILON, **result}


def _attacked(net: Logits, x: Tensor, y: Tensor, start: Tensor, ball: Ball) -> tuple[Tensor, Tensor]:
    """The images after one step and after ten."""
    loss: Callable[[Tensor], Tensor] = partial(F.cross_entropy, target=y, reduction="none")
    one, last = (ascend(net, x, start, loss, ball, EPSILON / 4, count) for count in (1, STEPS))
    return one, last


def trained(options: argparse.Namespace, source: registry.DataSet) -> nn.Module:
    """A small network, trained against PGD, pruned by LAMP and fine-tuned."""
    torch.manual_seed(options.seed)
    width = width_option(options.trained_width)
    model = models.build(options.trained, num_classes=source.num_classes, shape=source.shape, **width)
    say(f"training {options.trained} on Fashion images for {options.epochs} + {options.epochs} epochs")
    images = source.train.select(subset(len(source.train), options.train_images, options.seed))
    batches, objective = Batches(images, 128), PgdTraining(epsilon=EPSILON, steps=3)
    fit(model, batches, objective, Dense(Weights(model)), epochs=options.epochs, lr=0.05, seed=options.seed)
    units = Weights(model)
    masks = Lamp(units, options.trained_keep).masks()
    fit(model, batches, objective, Fixed(units, masks), epochs=options.epochs, lr=0.05, seed=options.seed)
    return model.cpu().eval()


def _facts(options: argparse.Namespace, model: nn.Module, masks: Masks) -> dict[str, Any]:
    spent = macs.cost(model, SHAPE, masks)
    used = ("model", "width", "keep", "strategy", "seed", "batch", "threads", "repeats", "step_repeats")
    return {
        "benchmark": "attack",
        **{name: getattr(options, name) for name in used},
        "kept": kept_weights(masks),
        "kept_macs": round(spent["macs_kept"] / spent["macs"], 6),
        "metric": f"{options.clock}_seconds",
        "isa": _isa(),
        "versions": {"harp": harp.__version__, "torch": str(torch.__version__)},
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": load(),
    }


def _isa() -> str | None:
    """The instruction set that the engine computes with."""
    fit = bindings.kernels()
    return None if fit is None else fit.name.decode()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="attack.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A table and, as the last line of standard output, one JSON object; progress goes to standard error.\n"
        "Example: python benchmarks/attack.py --model vgg16 --keep 0.01 --strategy harp-like --batch 128\n"
        "Quick:   python benchmarks/attack.py --model resnet8 --keep 0.1 --batch 16 --repeats 2 --epochs 1",
    )
    add_arguments(parser)
    parser.add_argument("--batch", default=128, type=positive, help="images at a time (default: 128)")
    parser.add_argument("--threads", default=1, type=positive, help="of both variants (default: 1)")
    parser.add_argument("--repeats", default=5, type=positive, help="turns of each variant (default: 5)")
    parser.add_argument("--step-repeats", default=1, type=positive, help="turns of the training step (default: 1)")
    parser.add_argument("--seed", default=0, type=int, help="of everything random (default: 0)")
    parser.add_argument("--parts", default=PARTS, nargs="+", choices=PARTS, help="what to measure (default: all)")
    parser.add_argument("--trained", default="resnet8", help="the network that is trained (default: resnet8)")
    parser.add_argument("--trained-width", type=float, default=1.0, help="its width (default: 1)")
    parser.add_argument("--trained-keep", type=float, default=0.1, help="share of its weights (default: 0.1)")
    parser.add_argument("--epochs", default=3, type=positive, help="of its training, twice (default: 3)")
    parser.add_argument("--train-images", default=4000, type=positive, help="images it is trained on (default: 4000)")
    parser.add_argument(
        "--agreement-images", default=500, type=positive, help="images it is attacked on (default: 500)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
