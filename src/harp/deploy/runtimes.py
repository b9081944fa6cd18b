"""Runtimes open a network's file and return a function from images to logits.

A runtime's packages are imported when it is loaded and not before: a fresh process loads only what its runtime needs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from harp.errors import MissingExtra

Predict = Callable[[Any], Any]  # float32 arrays of numpy, (N, C, H, W) to (N, classes)
Opener = Callable[[Path, int], Predict]  # file and number of threads


@dataclass(frozen=True)
class Runtime:
    """A runtime: the package that it belongs to, and a function that imports it and returns its opener."""

    package: str
    imported: Callable[[], Opener]
    install: str = '"harp-prune[export]"'  # the argument of `pip install`

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    def load(self) -> Opener:
        """Import its packages; `MissingExtra` says what to install."""
        try:
            return self.imported()
        except ImportError as error:
            raise MissingExtra(f"{error.name} is not installed: pip install {self.install}") from error

    def open(self, path: Path, threads: int) -> Predict:
        """The function of a file."""
        return self.load()(path, threads)


def _sparse() -> Opener:
    from harp.engine.load import GENEROUS, load

    return lambda path, threads: load(path, threads=threads, limit=GENEROUS)


def _graph_in_torch() -> Opener:
    import torch
    from safetensors import safe_open

    from harp.engine.graph import reference
    from harp.engine.graph.nodes import Graph

    def open_graph(path: Path, threads: int) -> Predict:
        torch.set_num_threads(threads)
        with safe_open(path, framework="pt") as file:
            graph = Graph.from_dict(json.loads(file.metadata()["graph"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        return _without_gradients(lambda images: reference.run(graph, tensors, images))

    return open_graph


def _torch_export() -> Opener:
    import torch

    def open_program(path: Path, threads: int) -> Predict:
        with path.open("rb") as file:  # safe for a file that we wrote: loading a program runs its code
            return _without_gradients(torch.export.load(file).module())

    return open_program


def _state_dict() -> Opener:
    """The file is JSON: the model of a recipe, its classes, image shape and cut, and the path of its weights."""
    from harp.experiments.recipe import Model
    from harp.models.weights import load_weights
    from harp.pruning.channels import Cut

    def open_state_dict(path: Path, threads: int) -> Predict:
        description = json.loads(path.read_text("utf-8"))
        model = Model(**description["model"]).build(description["classes"], tuple(description["shape"]))
        if description["cut"] is not None:
            Cut.from_dict(description["cut"]).apply(model)
        load_weights(model, description["weights"])
        return _without_gradients(model.eval())

    return open_state_dict


def _without_gradients(model: Callable[[Any], Any]) -> Predict:
    import torch

    def predict(images: Any) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(images)).numpy()

    return predict


def onnx_session(path: Path, threads: int) -> Any:
    """ONNX Runtime's session of a file, on the processor."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 4  # only fatal errors are printed; others are raised
    # Threads that spin after their work would slow down other runtimes.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def _onnxruntime() -> Opener:
    import onnxruntime  # noqa: F401 (the import is timed)

    def open_onnx(path: Path, threads: int) -> Predict:
        session = onnx_session(path, threads)
        name = session.get_inputs()[0].name
        return lambda images: session.run(None, {name: images})[0]

    return open_onnx


def _openvino() -> Opener:
    openvino: Any = import_module("openvino")  # by name: it has no types, and may not be installed

    def open_onnx(path: Path, threads: int) -> Predict:
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": 1,
        }
        request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()
        return lambda images: request.infer([images], share_inputs=True)[0]

    return open_onnx


RUNTIMES = {
    "sparse": Runtime("harp-prune", _sparse),
    "torch": Runtime("torch", _graph_in_torch),
    "onnxruntime": Runtime("onnxruntime", _onnxruntime),
    "openvino": Runtime("openvino", _openvino, "openvino"),
    "torch-export": Runtime("torch", _torch_export),
    "state_dict": Runtime("torch", _state_dict),
}
"""By name. `harp bench` compares the first four; an export is checked by the one that reads its format."""
