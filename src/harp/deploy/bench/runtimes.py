"""The runtimes: each opens its own kind of file and returns a function from images to logits.

Nothing is imported before a runtime is opened: a fresh process loads only what its runtime needs.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harp.errors import MissingExtra

Predict = Callable[[Any], Any]  # float32 arrays of numpy, (N, C, H, W) to (N, classes)


@dataclass(frozen=True)
class Runtime:
    """A runtime: its name, the modules it imports, and the function that opens a file."""

    name: str
    distribution: str
    modules: tuple[str, ...]
    opened: Callable[[Path, int], Predict]
    extra: str = ""

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def load(self) -> None:
        """Import its modules; `MissingExtra` says what to install."""
        for module in self.modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise MissingExtra(f"{module.partition('.')[0]} is not installed: pip install {self.extra}") from error


def _sparse(path: Path, threads: int) -> Predict:
    from harp.engine.load import GENEROUS, load

    return load(path, threads=threads, limit=GENEROUS)


def _torch(path: Path, threads: int) -> Predict:
    import torch
    from safetensors import safe_open

    from harp.engine.graph import reference
    from harp.engine.graph.nodes import Graph

    torch.set_num_threads(threads)
    with safe_open(path, framework="pt") as file:
        graph = Graph.from_dict(json.loads(file.metadata()["graph"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)

    def predict(images: Any) -> Any:
        with torch.inference_mode():
            return reference.run(graph, tensors, torch.from_numpy(images)).numpy()

    return predict


def _onnxruntime(path: Path, threads: int) -> Predict:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    settings.log_severity_level = 3
    # Threads that spin after their work would slow down the next runtime.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0].name
    return lambda images: session.run(None, {entry: images})[0]


def _openvino(path: Path, threads: int) -> Predict:
    openvino: Any = importlib.import_module("openvino")  # without types, whether it is installed or not
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
    }
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    request = compiled.create_infer_request()
    return lambda images: request.infer([images], share_inputs=True)[0]


_EXPORT = '"harp-prune[export]"'

RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("sparse", "harp-prune", ("harp.engine.load",), _sparse),
        Runtime("torch", "torch", ("torch", "safetensors", "harp.engine.graph.reference"), _torch),
        Runtime("onnxruntime", "onnxruntime", ("onnxruntime",), _onnxruntime, _EXPORT),
        Runtime("openvino", "openvino", ("openvino",), _openvino, "openvino"),
    )
}
"""By name: the engine of this library, torch with all weights, and the runtimes that read ONNX."""
