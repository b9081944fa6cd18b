"""AutoAttack: ours and the pyautoattack package, on the same network and the same images.

Both take turns in one process. The network is a small one with batch norm, trained against PGD on the embedded Fashion
images, so that it is partly robust: an evaluation spends its time on robust images. Images about which the two differ
are printed, as the attacks draw other random numbers.
"""

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.terminal import Parser, positive, progress, say
from benchmarks.timing import Times, cpu_name, interleaved, load

import harp
from harp import models
from harp.attacks import autoattack
from harp.attacks.batched import Packing
from harp.data import registry
from harp.data.batches import Batches
from harp.errors import HarpError, MissingExtra
from harp.evaluation.score import subset
from harp.models.weights import load_weights, save_model
from harp.pruning.methods import Dense
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import PgdTraining

NORMS = {"linf": "Linf", "l2": "L2"}
THEIRS = {"apgd-ce": "apgd", "apgd-t": "apgd_targeted", "fab-t": "fab", "square": "square"}  # their attributes
Seconds = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        result = measure(options)
    except HarpError as error:
        print(f"autoattack.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Train or load the network, run both, print the table; return the JSON object."""
    source = registry.load("fashion")
    model = network(options, source)
    test = source.test.select(subset(len(source.test), options.examples, 0))
    x, y = test.images.float() / 255, test.labels.long()
    with torch.no_grad():
        natural = model(x).argmax(1) == y
    say(f"{len(x)} images, {float(natural.float().mean()):.1%} right, {options.norm} {options.epsilon:g}")
    seconds: dict[str, Seconds] = {"ours": defaultdict(list), "theirs": defaultdict(list)}
    right_images: dict[str, Tensor] = {}

    def robust(points: Tensor) -> Tensor:
        with torch.no_grad():
            return model(points).argmax(1) == y

    run = {"ours": ours(model, options, seconds["ours"]), "theirs": theirs(model, options, seconds["theirs"])}
    variants = {name: lambda name=name: right_images.update({name: robust(run[name](x, y))}) for name in run}
    times = interleaved(variants, options.repeats, progress(options.repeats))
    disagreements = [
        {"image": int(at), "robust_by": "ours" if right_images["ours"][at] else "theirs"}
        for at in (right_images["ours"] != right_images["theirs"]).nonzero().flatten()
    ]
    _table(times, seconds, right_images, disagreements)
    share = {name: float(right.float().mean()) for name, right in right_images.items()}
    return {
        "benchmark": "autoattack",
        "network": options.network,
        "width": options.width,
        "norm": options.norm,
        "epsilon": options.epsilon,
        "n": len(x),
        "batch": options.batch,
        "threads": options.threads,
        "repeats": options.repeats,
        "natural": round(float(natural.float().mean()), 4),
        "robust_ours": round(share["ours"], 4),
        "robust_theirs": round(share["theirs"], 4),
        "disagreements": disagreements,
        "metric": "cpu_seconds",
        "speedup": round(times["theirs"].median("cpu") / times["ours"].median("cpu"), 3),
        "speedup_wall": round(times["theirs"].median("wall") / times["ours"].median("wall"), 3),
        **{f"{name}_seconds": round(taken.median("cpu"), 2) for name, taken in times.items()},
        "cpu_seconds": {name: [round(t, 2) for t in taken.cpu] for name, taken in times.items()},
        "wall_seconds": {name: [round(t, 2) for t in taken.wall] for name, taken in times.items()},
        "parts": {
            name: {part: round(sum(s) / options.repeats, 2) for part, s in seconds[name].items()} for name in run
        },
        "versions": {
            "harp": harp.__version__,
            "pyautoattack": version("pyautoattack"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": load(),
    }


def network(options: argparse.Namespace, source: registry.DataSet) -> nn.Module:
    """The network in eval mode: from its file, else trained from a seed and written there."""
    torch.manual_seed(0)
    model = models.build(options.network, num_classes=source.num_classes, shape=source.shape, width=options.width)
    path = None if options.model is None else Path(options.model)
    if path is not None and path.exists():
        load_weights(model, path)
        return model.eval()
    say(f"training {options.network} for {options.epochs} epochs against PGD")
    objective = PgdTraining(epsilon=0.1, steps=5)
    fit(model, Batches(source.train, 128), objective, Dense(Weights(model)), epochs=options.epochs, lr=0.05)
    if path is not None:
        save_model(path, model)
    return model.cpu().eval()


def ours(model: nn.Module, options: argparse.Namespace, seconds: Seconds) -> Callable[[Tensor, Tensor], Tensor]:
    """This library's ensemble, called as by `harp.evaluation.score`."""

    class Timed(Packing):
        def run(self, *arguments: Any) -> None:
            began = time.process_time()
            super().run(*arguments)
            seconds[self.attack.name.rpartition("-")[0]].append(time.process_time() - began)

    attack = autoattack.AutoAttack(options.epsilon, options.norm)

    def run(x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(0)
        autoattack.Packing = Timed  # type: ignore[attr-defined,misc]  # a stop-watch for a while
        try:
            return torch.cat([attack(model, *pair) for pair in _batches(x, y, options.batch)])
        finally:
            autoattack.Packing = Packing  # type: ignore[attr-defined,misc]  # as it was

    return run


def theirs(model: nn.Module, options: argparse.Namespace, seconds: Seconds) -> Callable[[Tensor, Tensor], Tensor]:
    """The standard version of the package."""
    try:
        import pyautoattack
    except ImportError as error:
        raise MissingExtra("the benchmark compares with a package: pip install pyautoattack") from error
    adversary = pyautoattack.AutoAttack(model, norm=NORMS[options.norm], eps=options.epsilon, seed=0)
    for part, attribute in THEIRS.items():
        attack = getattr(adversary, attribute)
        attack.perturb = _timed(attack.perturb, part, seconds)
    return lambda x, y: adversary.run_standard_evaluation(x, y, batch_size=options.batch)[0]


def _timed(call: Callable[..., Tensor], name: str, seconds: Seconds) -> Callable[..., Tensor]:
    def timed(*arguments: Any) -> Tensor:
        began = time.process_time()
        answer = call(*arguments)
        seconds[name].append(time.process_time() - began)
        return answer

    return timed


def _batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def _table(
    times: dict[str, Times],
    seconds: dict[str, Seconds],
    right_images: dict[str, Tensor],
    disagreements: list[dict[str, Any]],
) -> None:
    repeats = len(times["ours"].cpu)
    print(f"{'cpu seconds':<12} {'ours':>9} {'theirs':>9} {'ratio':>7}")
    for part in THEIRS:
        mean = {name: sum(seconds[name][part]) / repeats for name in times}
        _row(part, mean["ours"], mean["theirs"])
    _row("all", *(times[name].median("cpu") for name in ("ours", "theirs")))
    _row("all, wall", *(times[name].median("wall") for name in ("ours", "theirs")))
    ours, theirs = (float(right_images[name].float().mean()) for name in ("ours", "theirs"))
    print(f"{'robust':<12} {ours:9.1%} {theirs:9.1%}")
    for image in disagreements:
        print(f"image {image['image']} is robust only by {image['robust_by']}")


def _row(name: str, ours: float, theirs: float) -> None:
    ratio = f"x{theirs / ours:6.2f}" if ours and theirs else f"{'-':>7}"
    print(f"{name:<12} {ours:9.2f} {theirs:9.2f} {ratio}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="autoattack.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A table and, as the last line of standard output, one JSON object; progress goes to standard error.\n"
        "Example: python benchmarks/autoattack.py --examples 100 --model fashion.safetensors\n"
        "Quick:   python benchmarks/autoattack.py --examples 20 --epochs 2",
    )
    parser.add_argument("--model", help="the network's weights; written there after training if there is no such file")
    parser.add_argument("--network", default="convnet", help="a name (`harp list models`; default: convnet)")
    parser.add_argument("--width", default=16, type=float, help="the network's width (default: 16)")
    parser.add_argument("--epochs", default=6, type=positive, help="of the training (default: 6, a few minutes)")
    parser.add_argument("--examples", default=100, type=positive, help="test images (default: 100)")
    parser.add_argument("--batch", default=250, type=positive, help="images attacked together (default: 250, theirs)")
    parser.add_argument("--epsilon", default=0.1, type=float, help="the size of the ball (default: 0.1)")
    parser.add_argument("--norm", default="linf", choices=NORMS, help="of the ball (default: linf)")
    parser.add_argument("--repeats", default=1, type=positive, help="how often each is timed (default: 1)")
    parser.add_argument("--threads", default=1, type=positive, help="of torch (default: 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
