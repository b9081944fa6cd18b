"""Networks whose channels were cut out, against the dense one: eager torch, ONNX Runtime, and a fine-tuning step.

Channels are pruned by magnitude to a share of the FLOPs (the answer is worthless untrained, its speed is not). All
networks take turns in one process. `speedup` is the dense network's median time over the small one's; `share` is that
over the FLOPs' ratio, the speed-up that a machine would reach if it did nothing but multiply. The fine-tuning step is
PGD training: on the small network, and on the dense one under masks, which is what there is without cutting.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.terminal import Parser, positive, progress, say
from benchmarks.timing import cpu_name, interleaved, load

from harp import models
from harp.errors import HarpError
from harp.pruning.channels import Channels
from harp.pruning.masks import apply
from harp.pruning.methods import Dense, Fixed, Magnitude, Pruner
from harp.pruning.units import Weights
from harp.training.objectives import PgdTraining

SHAPE, CLASSES = (3, 32, 32), 10
FACTORS = (4, 10)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and the JSON object."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        print(json.dumps(measure(options)))
    except HarpError as error:
        print(f"slim.py: {error}", file=sys.stderr)
        return 2
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Cut the networks, time them, print the table; return the JSON object."""
    torch.manual_seed(0)
    width = {} if options.width is None else {"width": options.width}
    model = models.build(options.model, num_classes=CLASSES, shape=SHAPE, **width).train()
    with torch.no_grad():
        for _ in range(3):  # batch norms need statistics, or an eval-mode network is another function
            model(torch.rand(64, *SHAPE))
    say(f"{options.model}: following its channels")
    units = Channels(model, torch.rand(2, *SHAPE))
    networks, masks, ratio = {"dense": model}, {}, {}
    for factor in FACTORS:
        name, masked = f"{factor}x", copy.deepcopy(model)
        masks[name] = Magnitude(units, 1 / factor).masks()
        apply(masked, masks[name])
        networks[name] = units.slim(masked, masks[name])
        ratio[name] = units.size / units.spent(masks[name])
    result: dict[str, Any] = {"benchmark": "slim", "model": options.model, "width": options.width}
    result |= {"flops_ratio": {name: round(value, 3) for name, value in ratio.items()}}
    result |= {"threads": options.threads, "repeats": options.repeats}
    for engine, variants in (("torch", eager), ("ort", runtime)):
        result[f"speedup_{engine}"] = _speedups(engine, variants(networks), ratio, options)
    steps = _fine_tuning(model, networks, masks, options.train_batch)
    result["speedup_finetune"] = _train_speedups(steps, ratio, options)
    versions = {"torch": torch.__version__, "onnxruntime": version()}
    return result | {**versions, "cpu": cpu_name(), "load": load(), "metric": "wall_seconds"}


Variants = dict[str, Callable[[Tensor], object]]


def eager(networks: dict[str, nn.Module]) -> Variants:
    """Plain calls in eval mode, batch norms folded by nobody."""
    models = {name: copy.deepcopy(net).eval() for name, net in networks.items()}

    def call(net: nn.Module) -> Callable[[Tensor], object]:
        def forward(x: Tensor) -> object:
            with torch.inference_mode():
                return net(x)

        return forward

    return {name: call(net) for name, net in models.items()}


def runtime(networks: dict[str, nn.Module]) -> Variants:
    """ONNX Runtime; none where it is not installed."""
    if version() is None:
        say("onnxruntime, onnx or onnxscript is not installed: only torch is measured")
        return {}
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3
    sessions: Variants = {}
    for name, net in networks.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            batch = {0: torch.export.Dim("batch", min=1, max=1024)}
            torch.onnx.export(
                copy.deepcopy(net).eval(),
                (torch.rand(2, *SHAPE),),
                path,
                dynamic_shapes=(batch,),
                dynamo=True,
                verbose=False,
                external_data=False,
            )
            session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        entry = session.get_inputs()[0].name
        sessions[name] = lambda x, session=session, entry=entry: session.run(None, {entry: x.numpy()})
    return sessions


def _fine_tuning(
    model: nn.Module, networks: dict[str, nn.Module], masks: dict[str, Any], batch: int
) -> dict[str, Callable[[], object]]:
    """A step of PGD training on each small network, and on the dense one under its masks."""
    x, y = torch.rand(batch, *SHAPE), torch.randint(CLASSES, (batch,))

    def stepper(net: nn.Module, pruner: Pruner) -> Callable[[], object]:
        optimizer = torch.optim.SGD(pruner.trainable(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        pruner.start()

        def step() -> object:
            optimizer.zero_grad()
            PgdTraining(steps=3)(net, x, y).backward()
            pruner.after_backward()
            optimizer.step()
            return pruner.after_step()

        return step

    variants = {}
    for name, pruned in masks.items():
        masked, small = copy.deepcopy(model).train(), copy.deepcopy(networks[name]).train()
        ones = {
            n: torch.ones_like(w, dtype=torch.bool)
            for n, w in zip(Weights(masked).names, Weights(masked).weights, strict=True)
        }
        variants[f"masked {name}"] = stepper(masked, Fixed(Weights(masked), {**ones, **pruned}))
        variants[f"slim {name}"] = stepper(small, Dense(Weights(small)))
    return variants


def _speedups(engine: str, variants: Variants, ratio: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    speedups: dict[str, Any] = {}
    for batch in (1, 64) if variants else ():
        x = torch.rand(batch, *SHAPE)
        calls = max(1, 64 // batch // 2)
        turns = {name: _several(variant, x, calls) for name, variant in variants.items()}
        for turn in turns.values():
            turn()
        times = interleaved(turns, options.repeats, progress(options.repeats))
        for name, times_fewer in ratio.items():
            speedup = times["dense"].median("wall") / times[name].median("wall")
            speedups[f"{name} batch {batch}"] = round(speedup, 2)
            ms = [1e3 * times[n].median("wall") / calls for n in ("dense", name)]
            words = f"{engine:<8} batch {batch:>3} {name:>4}: {ms[0]:8.2f} -> {ms[1]:8.2f} ms, x{speedup:5.2f}"
            print(f"{words}, FLOPs x{times_fewer:5.2f}, share {speedup / times_fewer:.2f}")
    return speedups


def _train_speedups(
    variants: dict[str, Callable[[], object]], ratio: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    for variant in variants.values():
        variant()
    times = interleaved(variants, options.repeats, progress(options.repeats))
    speedups = {}
    for name, times_fewer in ratio.items():
        slow, quick = (times[f"{kind} {name}"].median("wall") for kind in ("masked", "slim"))
        speedups[name] = round(slow / quick, 2)
        print(
            f"finetune batch {options.train_batch:>3} {name:>4}: {1e3 * slow:8.1f} -> {1e3 * quick:8.1f} ms, "
            f"x{slow / quick:5.2f}, FLOPs x{times_fewer:5.2f}, share {slow / quick / times_fewer:.2f}"
        )
    return speedups


def _several(variant: Callable[[Tensor], object], x: Tensor, calls: int) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(calls):
            variant(x)

    return turn


def version() -> str | None:
    try:
        import onnx  # noqa: F401 (only whether it is there)
        import onnxruntime
        import onnxscript  # noqa: F401 (only whether it is there)
    except ImportError:
        return None
    return str(onnxruntime.__version__)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="slim.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A table and, as the last line of standard output, one JSON object; progress goes to standard error.\n"
        "Example: python benchmarks/slim.py --model vgg16 --repeats 7\n"
        "Quick:   python benchmarks/slim.py --model resnet8 --repeats 2 --train-batch 16",
    )
    parser.add_argument(
        "--model", default="vgg16", help="a name (`harp list models`) for 32x32 images (default: vgg16)"
    )
    parser.add_argument("--width", default=None, type=float, help="the network's width, where it has one")
    parser.add_argument("--repeats", default=7, type=positive, help="how often each variant is timed (default: 7)")
    parser.add_argument("--train-batch", default=64, type=positive, help="images of a fine-tuning step (default: 64)")
    parser.add_argument(
        "--threads", default=torch.get_num_threads(), type=positive, help="threads of torch (default: as it is set)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
