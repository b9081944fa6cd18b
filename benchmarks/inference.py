"""What a pruned network's answers cost: the sparse engine against dense torch, ONNX Runtime and OpenVINO.

The network has random weights and random masks with the counts of a strategy (see pruned.py): its answers are worth
nothing, its cost is that of a trained one. All variants take turns in one process, a few calls each, and medians are
compared: by CPU time with one thread, which other programs disturb least, else by the wall clock.

engine       `harp.load` of the .harp file (weights in 32 bit), on arrays of numpy
torch        the model itself in eval mode, dense
frozen       the same with batch norms folded and the faster memory layout, as attacks use it; the engine is off
onnxruntime  dense, all graph optimisations
openvino     dense, 32 bit, where it is installed

Memory and the cold start are those of fresh processes. A dense start is: import torch and the model's code, build the
model, load its weights from safetensors, predict. The engine's is: import harp.load, which needs no torch, open the
file, predict. The ratio is given with the imports, and without them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pruned import CLASSES, SHAPE, add_arguments, pruned, width_option
from benchmarks.switch import engine
from benchmarks.terminal import Parser, positive, say
from benchmarks.timing import Times, cpu_name, interleaved, load

import harp
from harp.attacks.fast_forward import frozen
from harp.deploy import fresh_process
from harp.deploy.bench import BenchFiles, of_model, write_sparse
from harp.deploy.runtimes import RUNTIMES, Predict
from harp.engine.load import load as load_network
from harp.engine.native import bindings
from harp.errors import CheckpointError, HarpError, ModelError
from harp.models.weights import save_model
from harp.pruning import macs
from harp.pruning.channels.removal import remove_dead
from harp.pruning.masks import Masks
from harp.pruning.masks import kept as kept_weights

Variants = dict[str, Predict]
DENSE = ("torch", "frozen", "onnxruntime", "openvino")
COLD_REPEATS = 3


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables and the JSON object."""
    options = _parser().parse_args(arguments)
    options.clock = "cpu" if options.threads == 1 else "wall"
    torch.set_num_threads(options.threads)
    try:
        if bindings.kernels() is None:  # the engine would answer all the same, by torch
            raise ModelError("this installation has no native code for this machine: there is no engine to measure")
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            result = measure(options, Path(folder), stack)
    except HarpError as error:
        print(f"inference.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Prune, open everything, time it; return the JSON object."""
    model, masks = _pruned(options, options.keep)
    example = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(options.seed))
    say(f"{options.model}: {kept_weights(masks):,} weights, {options.strategy}; writing the network's files")
    files = of_model(model, example, folder)
    small = _small(options, model, masks, example, folder)
    engine_file = files.files["sparse"] if small is None else small.files["sparse"]
    with engine(on=False):  # from here on what torch computes is dense
        variants = dense_variants(model, files, options.threads, stack)
        variants = {"engine": RUNTIMES["sparse"].open(engine_file, options.threads), **variants}
        if small is not None and "onnxruntime" in small.files:
            variants["onnxruntime, small"] = RUNTIMES["onnxruntime"].open(small.files["onnxruntime"], options.threads)
        torch.set_num_threads(options.threads)
        result = _facts(options, model, masks, files, engine_file)
        for size in options.batch:
            of_size = compared(variants, _images(size, options.seed), options)
            for key, value in of_size.items():
                result.setdefault(key, {})[str(size)] = value
        if options.two_threads:
            result["speedup_two_threads"] = two_threads(engine_file, options)
        if options.density_sweep:
            result["density_sweep"] = density_sweep(options, variants, folder)
        result["disconnected"] = disconnected(variants["engine"], options)
    if not options.skip_fresh:
        result["memory"] = memory(files, engine_file, max(options.batch), options)
        result["cold_start"] = cold_start(options, model, engine_file, folder)
    return result


def _pruned(options: argparse.Namespace, keep: float, strategy: str | None = None) -> tuple[nn.Module, Masks]:
    how = {"width": options.width, "clustered": options.clustered, "seed": options.seed}
    return pruned(options.model, keep, strategy or options.strategy, **how)


def _small(
    options: argparse.Namespace, model: nn.Module, masks: Masks, example: torch.Tensor, folder: Path
) -> BenchFiles | None:
    """The network without its dead channels, if asked for."""
    if not options.remove_dead:
        return None
    say("removing dead channels")
    removed = remove_dead(model, example, masks)
    before, after = removed.parameters
    say(f"  {after:,} of {before:,} parameters are left in its tensors")
    (folder / "small").mkdir()
    return of_model(removed.model.eval(), example, folder / "small")


def dense_variants(model: nn.Module, files: BenchFiles, threads: int, stack: ExitStack) -> Variants:
    """Everything that computes with all weights, zero or not."""
    net = stack.enter_context(frozen(model, torch.rand(8, *SHAPE)))

    def call(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
        with torch.no_grad():
            return function(torch.from_numpy(x)).numpy()

    variants: Variants = {"torch": partial(call, model), "frozen": partial(call, net)}
    for name in ("onnxruntime", "openvino"):
        if name in files.files:
            variants[name] = RUNTIMES[name].open(files.files[name], threads)
        else:
            say(f"{name} is not installed: not measured")
    return variants


def compared(variants: Variants, x: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The times of all variants for one batch, as a table and as numbers."""
    expected = variants["torch"](x)
    times, calls = _timed(variants, x, options)
    error = float(np.abs(variants["engine"](x) - expected).max() / np.abs(expected).max())  # after many calls
    seconds = {name: taken.median(options.clock) / calls for name, taken in times.items()}
    for name, taken in times.items():
        faster = f"engine x{seconds[name] / seconds['engine']:7.2f}" if name != "engine" else ""
        spread = taken.spread(options.clock)
        print(f"batch {len(x):>4}  {name:<18} {1e3 * seconds[name]:9.3f} ms  spread {spread:4.0%}  {faster}")
    against = {name: round(seconds[name] / seconds["engine"], 2) for name in seconds if name != "engine"}
    result = {
        "milliseconds": {name: round(1e3 * value, 4) for name, value in seconds.items()},
        "speedup_torch": min(against["torch"], against["frozen"]),  # the better of the two
        "speedup_dense": min(value for name, value in against.items() if name in DENSE),
        "max_relative_error": error,
    }
    for key, name in (("ort", "onnxruntime"), ("openvino", "openvino"), ("ort_small", "onnxruntime, small")):
        if name in against:
            result[f"speedup_{key}"] = against[name]
    return result


def _timed(variants: Mapping[str, Predict], x: Any, options: argparse.Namespace) -> tuple[dict[str, Times], int]:
    calls = max(1, 32 // len(x))
    turns = {name: partial(_several, variant, x, calls) for name, variant in variants.items()}
    for turn in turns.values():
        turn()
    return interleaved(turns, options.repeats), calls


def _several(variant: Predict, x: Any, calls: int) -> None:
    for _ in range(calls):
        variant(x)


def two_threads(file: Path, options: argparse.Namespace) -> dict[str, float]:
    """How much faster the engine is with two threads, by the wall clock."""
    variants = {str(count): RUNTIMES["sparse"].open(file, count) for count in (1, 2)}
    options = argparse.Namespace(
        **{**vars(options), "repeats": max(15, options.repeats)}
    )  # calls are short, and disturbed
    speedups = {}
    for size in options.batch:
        times, _ = _timed(variants, _images(size, options.seed), options)
        speedups[str(size)] = round(times["1"].median("wall") / times["2"].median("wall"), 2)
        print(f"batch {size:>4}  two threads: x{speedups[str(size)]:.2f} by wall time")
    return speedups


def density_sweep(options: argparse.Namespace, variants: Variants, folder: Path) -> dict[str, dict[str, float]]:
    """How much faster than the best dense variant the engine is at several budgets; dense does not depend on them."""
    strategy = "harp-like" if options.strategy == "harp" else options.strategy
    swept: Variants = {name: variant for name, variant in variants.items() if name in DENSE}
    example = torch.rand(2, *SHAPE)
    for keep in options.density_sweep:
        model, _ = _pruned(options, keep, strategy)
        file = folder / f"keep-{keep:g}.harp"
        write_sparse(model, example, file)
        swept[f"{keep:g}"] = RUNTIMES["sparse"].open(file, options.threads)
        say(f"  keep {keep:g}: ready")
    torch.set_num_threads(options.threads)
    speedups: dict[str, dict[str, float]] = {}
    for size in options.batch:
        times, _ = _timed(swept, _images(size, options.seed), options)
        best = min((name for name in times if name in DENSE), key=lambda name: times[name].median(options.clock))
        for keep in options.density_sweep:
            ratio = times[best].median(options.clock) / times[f"{keep:g}"].median(options.clock)
            speedups.setdefault(f"{keep:g}", {})[str(size)] = round(ratio, 2)
            words = ", disconnected: it has nothing to compute" if disconnected(swept[f"{keep:g}"], options) else ""
            print(f"batch {size:>4}  keep {keep:<6g} engine x{ratio:6.2f} of the best dense variant ({best}){words}")
    return speedups


def disconnected(variant: Predict, options: argparse.Namespace) -> bool:
    """Whether no kept weights lead from the images to the answers, which then are all alike: no speed to boast of."""
    answers = variant(_images(8, options.seed))
    return bool((answers == answers[0]).all())


def memory(files: BenchFiles, engine_file: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The most memory that a fresh process has for one batch, and how much of it came after the imports."""
    say("memory, in fresh processes")
    images, keys, result = _images(size, options.seed), ("peak_bytes", "added_bytes"), {}
    for name, file in {**files.files, "sparse": engine_file}.items():
        _, measured = fresh_process.predict(name, file, [images], options.threads)
        result["engine" if name == "sparse" else name] = {key: measured[key] for key in keys}
        if measured["peak_bytes"] is not None:
            peak, added = (measured[key] / 1e6 for key in keys)
            print(f"batch {size:>4}  {name:<12} peak {peak:7.1f} MB, {added:7.1f} MB beyond the imports")
    return {"batch": size, **result}


# What somebody does who has a checkpoint: no part of this library but the architecture is imported.
_DENSE_START = """
import json, sys, time
began = time.perf_counter()
import torch, safetensors.torch
from harp.models import MODELS, external
name, options, file, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
imported = time.perf_counter()
model = external.call(MODELS[name].factory, name, {classes}, {shape}, options)
model.load_state_dict(safetensors.torch.load_file(file))
model.eval()
opened = time.perf_counter()
with torch.inference_mode():
    model(torch.rand(1, *{shape}))
first = time.perf_counter()
print(json.dumps({{
    "import_seconds": imported - began, "open_seconds": opened - imported, "first_seconds": first - opened
}}))
"""


def cold_start(options: argparse.Namespace, model: nn.Module, engine_file: Path, folder: Path) -> dict[str, Any]:
    """Seconds from nothing to the first answer, of both, of_variant in fresh processes."""
    say("cold start, in fresh processes")
    weights, images = folder / "checkpoint.safetensors", _images(1, options.seed)
    save_model(weights, model)
    given = json.dumps([options.model, width_option(options.width), str(weights), options.threads])
    code = _DENSE_START.format(shape=SHAPE, classes=CLASSES)

    def dense() -> dict[str, float]:
        done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True)
        if done.returncode:
            raise CheckpointError(f"the dense network can't be started: {done.stderr.strip().splitlines()[-1]}")
        seconds: dict[str, float] = json.loads(done.stdout)
        return seconds

    runs: dict[str, list[dict[str, float]]] = {"engine": [], "dense": []}
    for _ in range(COLD_REPEATS):
        runs["engine"].append(fresh_process.predict("sparse", engine_file, [images], options.threads)[1])
        runs["dense"].append(dense())
    parts = ("import_seconds", "open_seconds", "first_seconds")
    medians: dict[str, Any] = {
        name: {part: round(statistics.median(run[part] for run in of_variant), 4) for part in parts}
        for name, of_variant in runs.items()
    }
    whole = {name: sum(medians[name][part] for part in parts) for name in runs}
    after = {name: whole[name] - medians[name]["import_seconds"] for name in runs}
    for name in runs:
        print(f"cold start  {name:<7} {whole[name]:6.2f} s, without imports {after[name]:6.3f} s")
    medians["speedup_with_imports"] = round(whole["dense"] / whole["engine"], 2)
    medians["speedup_without_imports"] = round(after["dense"] / after["engine"], 2)
    return medians


def _images(size: int, seed: int) -> Any:
    return np.random.default_rng(seed).random((size, *SHAPE), dtype=np.float32)


def _facts(
    options: argparse.Namespace, model: nn.Module, masks: Masks, files: BenchFiles, engine_file: Path
) -> dict[str, Any]:
    """What the numbers depend on."""
    spent = macs.cost(model, SHAPE, masks)
    network = load_network(engine_file)
    used = ("model", "width", "keep", "strategy", "clustered", "remove_dead", "seed", "threads", "repeats")
    named = {name: runtime.version for name, runtime in RUNTIMES.items() if name != "sparse"}
    return {
        "benchmark": "inference",
        **{name: getattr(options, name) for name in used},
        "kept": kept_weights(masks),
        "kept_macs": round(spent["macs_kept"] / spent["macs"], 6),
        "metric": f"{options.clock}_seconds",
        "isa": network.isa,
        "native_share": round(network.native_share, 4),
        "file_bytes": engine_file.stat().st_size,
        "dense_bytes": files.dense_bytes,
        "versions": {"harp": harp.__version__, "numpy": np.__version__, **named},
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": load(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="inference.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Tables and, as the last line of standard output, one JSON object; progress goes to standard error.\n"
        "Example: python benchmarks/inference.py --model vgg16 --keep 0.01 --strategy uniform --two-threads\n"
        "Quick:   python benchmarks/inference.py --model resnet8 --keep 0.1 --batch 1 8 --repeats 2 --skip-fresh",
    )
    add_arguments(parser)
    parser.add_argument("--clustered", default=0.0, type=float, help="width of the channels' log-normal importance")
    parser.add_argument("--remove-dead", action="store_true", help="remove dead channels first, for the engine")
    parser.add_argument("--batch", default=[1, 64], nargs="+", type=positive, help="images at a time (default: 1 64)")
    parser.add_argument("--threads", default=1, type=positive, help="of every variant (default: 1)")
    parser.add_argument("--repeats", default=9, type=positive, help="turns of each variant (default: 9)")
    parser.add_argument("--seed", default=0, type=int, help="of weights, masks and images (default: 0)")
    parser.add_argument("--two-threads", action="store_true", help="the engine with two threads against one, too")
    parser.add_argument("--density-sweep", default=[], nargs="+", type=float, help="the engine at these budgets, too")
    parser.add_argument("--skip-fresh", action="store_true", help="measure no fresh processes: memory, cold start")
    return parser


if __name__ == "__main__":
    sys.exit(main())
