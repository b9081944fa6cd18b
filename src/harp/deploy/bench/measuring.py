"""Benchmark an artefact: every runtime at every batch size, in turns, then each in a fresh process."""

import contextlib
import platform
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harp
from harp.deploy.bench import fresh
from harp.deploy.bench.clock import latencies
from harp.deploy.bench.prepared import Prepared
from harp.deploy.bench.runtimes import RUNTIMES, Predict
from harp.engine.network import Network
from harp.errors import CheckpointError, RecipeError
from harp.system.progress import Quiet
from harp.system.seeds import derive

_REFERENCES = ("torch", "onnxruntime")  # the first that has a file is the reference for the others


def measure(
    prepared: Prepared,
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
    images = {size: generator.random((size, *prepared.shape), dtype=np.float32) for size in dict.fromkeys(batches)}
    reference = next(name for name in (*_REFERENCES, *prepared.files) if name in prepared.files)
    total = len(images) * len(prepared.files) * repeats + len(prepared.files)
    with display.counting("bench", total), _threads(threads):
        functions = {name: RUNTIMES[name].opened(path, threads) for name, path in prepared.files.items()}
        notes = [*prepared.notes, *_computed_by_torch(functions)]
        differences = _differences(functions, images[max(images)], reference)
        rows, done = [], 0
        for size, x in images.items():
            calls = {name: partial(function, x) for name, function in functions.items()}
            seconds_by_name = latencies(calls, repeats, partial(_show, display, done, total, size))
            rows += [_row(name, size, seconds, seconds_by_name[reference]) for name, seconds in seconds_by_name.items()]
            done += len(functions) * repeats
        cold_starts = _cold_starts(prepared, images[min(images)], threads, display, done, total)
    facts = {
        name: {
            "version": harp.__version__ if name == "sparse" else RUNTIMES[name].version,
            "file_bytes": path.stat().st_size,
            "largest_difference": differences[name],
            **cold_starts[name],
        }
        for name, path in prepared.files.items()
    }
    return {
        "shape": list(prepared.shape),
        "threads": threads,
        "repeats": repeats,
        "seed": seed,
        "dense_bytes": prepared.dense_bytes,
        "against": reference,
        "latency": rows,
        "runtimes": facts,
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "notes": notes,
    }


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


def _cold_starts(prepared: Prepared, x: Any, threads: int, display: Quiet, done: int, total: int) -> dict[str, Any]:
    """Each runtime in a fresh process, with the smallest batch."""
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.npy"
        np.save(images, x)
        for number, (name, path) in enumerate(prepared.files.items()):
            display.count(done + number, total, f"{name}, in a process of its own")
            measured[name] = fresh.measure(name, path.absolute(), images, threads)
    return measured


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
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
