"""The files that the runtimes of a benchmark read: the same network in each."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from harp.deploy.export.formats import write_onnx
from harp.deploy.runtimes import RUNTIMES, onnx_session
from harp.engine import format
from harp.engine.capture.capture import capture
from harp.engine.graph.nodes import Graph
from harp.engine.graph.torch_module import InTorch
from harp.engine.load import GENEROUS, load
from harp.engine.store import pack
from harp.errors import CheckpointError, HarpError
from harp.experiments import finished_run, plan
from harp.system import files
from harp.system.tensors import save_tensors

_ONNX = ("onnxruntime", "openvino")


@dataclass(frozen=True)
class BenchFiles:
    """A network as files, by the name of the runtime.

    `dense_bytes` is the size of all its weights in 32 bit; None if unknown. `notes` say which files are missing.
    """

    shape: tuple[int, ...]
    files: dict[str, Path]
    dense_bytes: int | None
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
        network = finished_run.read(path).network(None if subject.shape is None else plan.parse_shape(subject.shape))
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
    RUNTIMES["onnxruntime"].load()
    try:
        inputs = onnx_session(path, 1).get_inputs()
    except Exception as error:  # the runtime's errors have no common class
        raise CheckpointError(f"can't read {path}: {files.reason(error)}") from error
    shape = inputs[0].shape[1:] if len(inputs) == 1 and inputs[0].type == "tensor(float)" else ()
    if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
        text = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in inputs)
        raise CheckpointError(f"{path} takes {text}: one batch of float images of a fixed size is expected")
    installed = {name: path for name in _ONNX if RUNTIMES[name].version is not None}
    notes = [f"{path.name} is measured as it is: no other runtime"]
    return BenchFiles(tuple(shape), installed, _onnx_bytes(path), notes)


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


def _onnx_bytes(path: Path) -> int | None:
    """The bytes of all weights of a file in 32 bit."""
    try:
        import onnx
    except ImportError:
        return None
    weights = onnx.load(str(path), load_external_data=False).graph.initializer
    return sum(4 * int(math.prod(tensor.dims)) for tensor in weights if len(tensor.dims))
