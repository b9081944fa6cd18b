"""All numbers of an artefact: every runtime at every batch size, in turns, then each in a process of its own."""

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
from harp.bench import fresh
from harp.bench.clock import latencies
from harp.bench.prepared import Prepared
from harp.bench.runtimes import RUNTIMES, Predict
from harp.display import Quiet
from harp.errors import CheckpointError, RecipeError
from harp.seeds import derive
from harp.sparse.network import Network

_SOURCES = ("torch", "onnxruntime")  # whose answers the others are held against, the first that is there


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

    Times are wall times of single calls. `speedup` is against the runtime of the same batch whose answers the others
    are held against: torch with all weights, where it is there.
    """
    if not batches or min(batches) < 1 or threads < 1 or repeats < 1:
        raise RecipeError(f"batch {list(batches)}, threads {threads}, repeats {repeats}: give whole numbers from 1 up")
    display = Quiet() if display is None else display
    generator = np.random.default_rng(derive(seed, "bench"))
    images = {size: generator.random((size, *prepared.shape), dtype=np.float32) for size in dict.fromkeys(batches)}
    source = next(name for name in (*_SOURCES, *prepared.files) if name in prepared.files)
    total = len(images) * len(prepared.files) * repeats + len(prepared.files)
    with display.counting("bench", total), _threads(threads):
        ways = {name: RUNTIMES[name].opened(path, threads) for name, path in prepared.files.items()}
        notes = [*prepared.notes, *_borrowed(ways)]
        apart = _differences(ways, images[max(images)], source)
        rows, done = [], 0
        for size, x in images.items():
            calls = {name: partial(way, x) for name, way in ways.items()}
            taken = latencies(calls, repeats, partial(_show, display, done, total, size))
            rows += [_row(name, size, seconds, taken[source]) for name, seconds in taken.items()]
            done += len(ways) * repeats
        alone = _alone(prepared, images[min(images)], threads, display, done, total)
    facts = {
        name: {
            "version": harp.__version__ if name == "sparse" else RUNTIMES[name].version,
            "file_bytes": path.stat().st_size,
            "largest_difference": apart[name],
            **alone[name],
        }
        for name, path in prepared.files.items()
    }
    return {
        "shape": list(prepared.shape),
        "threads": threads,
        "repeats": repeats,
        "seed": seed,
        "dense_bytes": prepared.dense_bytes,
        "against": source,
        "latency": rows,
        "runtimes": facts,
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "notes": notes,
    }


def _borrowed(ways: Mapping[str, Predict]) -> list[str]:
    """What of the engine's work is not its own: then its times are torch's."""
    network = ways.get("sparse")
    if not isinstance(network, Network) or network.native_share == 1:
        return []
    if network.isa is None:
        return ["sparse: this installation has no native code for this machine, torch computes all of it"]
    return [f"sparse: torch computes {1 - network.native_share:.0%} of the network's operations"]


def _show(display: Quiet, before: int, total: int, size: int, name: str, done: int) -> None:
    display.count(before + done, total, f"{name}, batch {size}")


def _differences(ways: Mapping[str, Predict], x: Any, source: str) -> dict[str, float]:
    """How far the logits are from the source's, relative to the largest of them."""
    answers = {}
    for name, way in ways.items():
        try:
            answers[name] = np.asarray(way(x))
        except Exception as error:  # a runtime of somebody else may raise anything
            text = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{name} can't compute a batch of {len(x)} images: {text}") from error
    largest = float(np.abs(answers[source]).max()) or 1.0
    return {name: float(np.abs(answer - answers[source]).max()) / largest for name, answer in answers.items()}


def _row(name: str, size: int, seconds: list[float], source: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "runtime": name,
        "batch": size,
        "median_ms": 1e3 * median,
        "p95_ms": 1e3 * float(np.percentile(seconds, 95)),
        "images_per_second": size / median,
        "speedup": statistics.median(source) / median,
    }


def _alone(prepared: Prepared, x: Any, threads: int, display: Quiet, done: int, total: int) -> dict[str, Any]:
    """Each runtime in a fresh process, with the smallest batch."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.npy"
        np.save(images, x)
        for number, (name, path) in enumerate(prepared.files.items()):
            display.count(done + number, total, f"{name}, in a process of its own")
            found[name] = fresh.measure(name, path.absolute(), images, threads)
    return found


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads of torch, and then as many as before."""
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
