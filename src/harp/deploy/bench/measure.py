"""Measure a network in every runtime at every batch size, in turns, then each runtime in a fresh process."""

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harp
from harp.deploy import fresh_process
from harp.deploy.bench.files import BenchFiles
from harp.deploy.runtimes import RUNTIMES, Predict
from harp.engine.network import Network
from harp.errors import CheckpointError, RecipeError
from harp.system.progress import Quiet
from harp.system.seeds import derive

_REFERENCES = ("torch", "onnxruntime")  # the first that has a file is the reference for the others
_TURN = 0.02  # seconds of timed calls in a turn


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
    with display.counting("bench", total), _torch_threads(threads):
        functions = {name: RUNTIMES[name].open(path, threads) for name, path in network.files.items()}
        notes = [*network.notes, *_computed_by_torch(functions)]
        differences = _differences(functions, images[max(images)], reference)
        rows, done = [], 0
        for size, x in images.items():
            calls = {name: partial(function, x) for name, function in functions.items()}
            seconds_by_name = latencies(calls, repeats, partial(_show, display, done, total, size))
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


def _show(display: Quiet, before: int, total: int, size: int, name: str, done: int) -> None:
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


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads for the block."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def cpu_name() -> str:
    """The model name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
