"""Benchmark a network: file size, latency and memory, in the sparse engine and in other runtimes.

Every runtime gets a file of the same network. All are timed in turns at every batch size; then a fresh process for each
measures memory and cold start.
"""

import contextlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import harp
from harp.deploy import fresh_process
from harp.deploy.export.formats import write_onnx
from harp.deploy.exported_eval import opened
from harp.deploy.runtimes import RUNTIMES, Predict
from harp.engine import format
from harp.engine.capture.capture import capture
from harp.engine.graph.nodes import Graph
from harp.engine.graph.reference import InTorch
from harp.engine.load import GENEROUS, load
from harp.engine.network import Network
from harp.engine.store import pack
from harp.errors import CheckpointError, HarpError, RecipeError
from harp.experiments import plan, run_folder
from harp.system import files
from harp.system.progress import Quiet
from harp.system.seeds import derive
from harp.system.tensors import save_tensors

_ONNX = ("onnxruntime", "openvino")
_REFERENCES = ("torch", "onnxruntime")  # the first that has a file is the reference for the others
_TURN = 0.02  # seconds of timed calls in a turn


@dataclass(frozen=True)
class BenchFiles:
    """A network as files, by the name of the runtime.

    `dense_bytes` is the size of all its weights in 32 bit. `notes` say which files are missing.
    """

    shape: tuple[int, ...]
    files: dict[str, Path]
    dense_bytes: int
    notes: list[str] = field(default_factory=list)


def of_target(subject: plan.Subject, folder: Path) -> BenchFiles:
    """The files of a command's target: a .harp or .onnx file, a run's folder, or a model with its weights.

    New files are written to `folder`.
    """
    path = Path(subject.spec)
    if path.suffix in (".harp", ".onnx"):
        if not path.is_file():
            raise CheckpointError(f"can't read {path}: there is no such file")
        return of_harp(path, folder) if path.suffix == ".harp" else of_onnx(path)
    if path.is_dir():
        network = run_folder.read(path).network(None if subject.shape is None else plan.parse_shape(subject.shape))
        example = torch.rand(2, *network.shape, generator=torch.Generator().manual_seed(0))
        # The dense size is that of the architecture before any cut.
        return of_model(network.model, example, folder, _bytes(dict(network.architecture.named_parameters())))
    source = subject.source()
    return of_model(subject.model(source), subject.images(source)[0][:2], folder)


def of_model(model: nn.Module, example: Tensor, folder: Path, dense_bytes: int | None = None) -> BenchFiles:
    """The files of a torch model; its zero weights count as pruned."""
    sparse = folder / "network.harp"
    graph, tensors = write_sparse(model, example, sparse)
    return _with_dense(sparse, graph, tensors, folder, dense_bytes or _bytes(tensors))


def write_sparse(model: nn.Module, example: Tensor, path: Path) -> tuple[Graph, dict[str, Tensor]]:
    """Write the file of the engine, with weights in 32 bit; return its graph and tensors."""
    captured = capture(model, example)
    tensors = captured.tensors(model)
    files.write_bytes(path, pack(captured.graph, tensors, {}, {}, "f32", "f32"))
    return captured.graph, tensors


def of_harp(path: Path, folder: Path) -> BenchFiles:
    """The files of a .harp file: itself, and the same network with all weights for the other runtimes."""
    graph = load(path, limit=GENEROUS).graph
    _, stored, _ = format.load(path, GENEROUS)
    tensors = {name: stored[name] for name in graph.tensor_names()}
    full = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return _with_dense(path, graph, full, folder, _bytes(full))


def of_onnx(path: Path) -> BenchFiles:
    """An ONNX file, for the installed runtimes that read it."""
    shape = opened(path).model.shape
    installed = {name: path for name in _ONNX if RUNTIMES[name].version is not None}
    return BenchFiles(shape, installed, _onnx_bytes(path), [f"{path.name} is measured as it is: no other runtime"])


def _with_dense(
    sparse: Path, graph: Graph, tensors: Mapping[str, Tensor], folder: Path, dense_bytes: int
) -> BenchFiles:
    """The file of the engine, and the same network with all weights for torch and as ONNX."""
    dense, onnx = folder / "dense.safetensors", folder / "dense.onnx"
    save_tensors(dense, tensors, {"graph": json.dumps(graph.as_dict())})
    paths, notes = {"sparse": sparse, "torch": dense}, []
    installed = [name for name in _ONNX if RUNTIMES[name].version is not None]
    missing = [name for name in _ONNX if name not in installed]
    if missing:
        notes.append(f"not installed, not measured: {', '.join(missing)}")
    if installed:
        try:
            write_onnx(onnx, InTorch(graph, tensors).eval(), torch.rand(2, *graph.input_shape))
            paths |= dict.fromkeys(installed, onnx)
        except HarpError as error:
            notes.append(f"not measured: {', '.join(installed)}; {error}")
    return BenchFiles(tuple(graph.input_shape), paths, dense_bytes, notes)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(4 * tensor.numel() for tensor in tensors.values())


def _onnx_bytes(path: Path) -> int:
    """The bytes of all weights of a file in 32 bit."""
    import onnx

    weights = onnx.load(str(path), load_external_data=False).graph.initializer
    return sum(4 * int(math.prod(tensor.dims)) for tensor in weights if len(tensor.dims))


def measure(
    network: BenchFiles,
    *,
    batches: Sequence[int] = (1, 64),
    threads: int = 1,
    repeats: int = 20,
    seed: int = 0,
    display: Quiet | None = None,
) -> dict[str, Any]:
    """Latency, throughput, cold start and memory of a network in every runtime that has a file of it.

    Times are wall times of single calls. `speedup` compares with the reference runtime at the same batch size: torch
    with all weights, if it has a file.
    """
    if not batches or min(batches) < 1 or threads < 1 or repeats < 1:
        raise RecipeError(f"batch {list(batches)}, threads {threads}, repeats {repeats}: give whole numbers from 1 up")
    display = Quiet() if display is None else display
    generator = np.random.default_rng(derive(seed, "bench"))
    images = {size: generator.random((size, *network.shape), dtype=np.float32) for size in dict.fromkeys(batches)}
    reference = next(name for name in (*_REFERENCES, *network.files) if name in network.files)
    total = len(images) * len(network.files) * repeats + len(network.files)
    with display.counting("bench", total), contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        functions = {name: RUNTIMES[name].open(path, threads) for name, path in network.files.items()}
        notes = [*network.notes, *_computed_by_torch(functions)]
        differences = _differences(functions, images[max(images)], reference)
        rows, done = [], 0
        for size, x in images.items():
            calls = {name: partial(function, x) for name, function in functions.items()}
            seconds_by_name = latencies(calls, repeats, partial(_show, display, total, size, done))
            rows += [_row(name, size, seconds, seconds_by_name[reference]) for name, seconds in seconds_by_name.items()]
            done += len(functions) * repeats
        runtimes = {}
        for number, (name, path) in enumerate(network.files.items()):
            display.count(done + number, total, f"{name}, in a fresh process")
            _, measured = fresh_process.predict(name, path, [images[min(images)]], threads)
            runtimes[name] = {
                "version": harp.__version__ if name == "sparse" else RUNTIMES[name].version,
                "file_bytes": path.stat().st_size,
                "largest_difference": differences[name],
                **{key: value for key, value in measured.items() if key != "torch"},
            }
    return {
        "shape": list(network.shape),
        "threads": threads,
        "repeats": repeats,
        "seed": seed,
        "dense_bytes": network.dense_bytes,
        "against": reference,
        "latency": rows,
        "runtimes": runtimes,
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "notes": notes,
    }


def latencies(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    on_turn: Callable[[str, int], None] = lambda name, done: None,
) -> dict[str, list[float]]:
    """The wall time in seconds of each call: `repeats` calls of every function, in turns whose order rotates.

    Other load on the machine so affects all functions alike. A turn begins with a call that is not timed: the caches
    hold the weights of the previous function. Quick functions have several timed calls a turn, so that they are
    measured warm. `on_turn(name, number of timed calls so far)` is called after each turn, for a display.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    calls = {name: _calls_a_turn(function) for name, function in functions.items()}
    names = list(functions)
    while unfinished := [name for name in names if len(seconds[name]) < repeats]:
        for name in unfinished:
            functions[name]()
            for _ in range(min(calls[name], repeats - len(seconds[name]))):
                began = time.perf_counter()
                functions[name]()
                seconds[name].append(time.perf_counter() - began)
            on_turn(name, sum(map(len, seconds.values())))
        names = names[1:] + names[:1]
    return seconds


def _calls_a_turn(function: Callable[[], object]) -> int:
    function()  # the first call may compile
    began = time.perf_counter()
    function()
    return max(1, round(_TURN / max(time.perf_counter() - began, 1e-6)))


def _computed_by_torch(functions: Mapping[str, Predict]) -> list[str]:
    """A note where torch computes a part of the sparse network: the engine's times then include torch's."""
    network = functions.get("sparse")
    if not isinstance(network, Network) or network.native_share == 1:
        return []
    if network.isa is None:
        return ["sparse: this installation has no native code for this machine, torch computes all of it"]
    return [f"sparse: torch computes {1 - network.native_share:.0%} of the network's operations"]


def _show(display: Quiet, total: int, size: int, before: int, name: str, done: int) -> None:
    display.count(before + done, total, f"{name}, batch {size}")


def _differences(functions: Mapping[str, Predict], x: Any, reference: str) -> dict[str, float]:
    """The largest difference of the logits from the reference's, relative to the largest of those."""
    logits = {}
    for name, function in functions.items():
        try:
            logits[name] = np.asarray(function(x))
        except Exception as error:  # a runtime may raise anything
            text = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{name} can't compute a batch of {len(x)} images: {text}") from error
    largest = float(np.abs(logits[reference]).max()) or 1.0
    return {name: float(np.abs(output - logits[reference]).max()) / largest for name, output in logits.items()}


def _row(name: str, size: int, seconds: list[float], reference: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "runtime": name,
        "batch": size,
        "median_ms": 1e3 * median,
        "p95_ms": 1e3 * float(np.percentile(seconds, 95)),
        "images_per_second": size / median,
        "speedup": statistics.median(reference) / median,
    }


def cpu_name() -> str:
    """The model name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
