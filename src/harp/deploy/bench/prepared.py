"""An artefact as the files that each runtime reads, all of them the same network."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from harp import artefact, checkpoint, compact, files, finished, models, survey
from harp.bench.runtimes import RUNTIMES
from harp.errors import CheckpointError, HarpError, RecipeError
from harp.export.formats import write_onnx
from harp.sparse.capture import capture
from harp.sparse.graph import Graph
from harp.sparse.in_torch import InTorch
from harp.sparse.loading import GENEROUS, load
from harp.sparse.storing import pack

_ONNX = ("onnxruntime", "openvino")


@dataclass(frozen=True)
class Prepared:
    """A network as files, by the name of the runtime.

    `dense_bytes` are those of all its weights in 32 bit; None if nobody knows. `notes` say what is not there, and why.
    """

    shape: tuple[int, ...]
    files: dict[str, Path]
    dense_bytes: int | None
    notes: list[str] = field(default_factory=list)


def of(subject: survey.Subject, folder: Path) -> Prepared:
    """The files of what a command names: a .harp or .onnx file, a run's folder, or a model with its weights.

    What has to be made goes into `folder`.
    """
    path = Path(subject.spec)
    if path.suffix in (".harp", ".onnx"):
        if not path.is_file():
            raise CheckpointError(f"can't read {path}: there is no such file")
        return of_harp(path, folder) if path.suffix == ".harp" else of_onnx(path)
    if path.is_dir():
        return of_run(path, folder, subject.shape)
    source = subject.source()
    return of_model(subject.model(source), subject.images(source)[0][:2], folder)


def of_model(model: nn.Module, example: Tensor, folder: Path, dense_bytes: int | None = None) -> Prepared:
    """The files of a model of torch: what is zero in it is what was pruned."""
    sparse = folder / "network.harp"
    graph, tensors = write_sparse(model, example, sparse)
    return _beside(sparse, graph, tensors, folder, dense_bytes or _bytes(tensors))


def write_sparse(model: nn.Module, example: Tensor, path: Path) -> tuple[Graph, dict[str, Tensor]]:
    """Write the file of the engine, with weights in 32 bit; the graph and the tensors in it."""
    captured = capture(model, example)
    tensors = captured.tensors(model)
    files.write_bytes(path, pack(captured.graph, tensors, {}, {}, "f32", "f32"))
    return captured.graph, tensors


def of_run(folder: Path, made: Path, shape: str | None = None) -> Prepared:
    """The files of a finished run's network; dense is the architecture before any cut."""
    run = finished.read(folder)
    size = run.shape if shape is None else survey.parse_shape(shape)
    if size is None:
        raise RecipeError(f"{folder} does not say the shape of its images: add --shape, like 3x32x32")
    part = run.recipe.model
    whole = models.build(part.name, num_classes=run.classes, shape=size, normalize=part.normalize, **part.options)
    model = copy.deepcopy(whole)
    artefact.load(folder, model)
    example = torch.rand(2, *size, generator=torch.Generator().manual_seed(0))
    return of_model(model.eval(), example, made, _bytes(dict(whole.named_parameters())))


def of_harp(path: Path, folder: Path) -> Prepared:
    """The files of a compact file: its own, and those of the same weights in full."""
    graph = load(path, limit=GENEROUS).graph
    _, stored, _ = compact.load(path, GENEROUS)
    tensors = {name: stored[name] for name in graph.tensor_names()}
    full = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return _beside(path, graph, full, folder, _bytes(full))


def of_onnx(path: Path) -> Prepared:
    """An ONNX file, for the runtimes that are installed."""
    runtime = RUNTIMES["onnxruntime"]
    runtime.load()
    import onnxruntime

    try:
        entries = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()
    except Exception as error:  # the runtime has errors of its own
        raise CheckpointError(f"can't read {path}: {_line(error)}") from error
    shape = entries[0].shape[1:] if len(entries) == 1 and entries[0].type == "tensor(float)" else ()
    if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
        found = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in entries)
        raise CheckpointError(f"{path} takes {found}: one batch of float images of a fixed size is expected")
    there = {name: path for name in _ONNX if RUNTIMES[name].version is not None}
    return Prepared(tuple(shape), there, _onnx_bytes(path), [f"{path.name} is measured as it is: no other runtime"])


def _beside(sparse: Path, graph: Graph, tensors: Mapping[str, Tensor], folder: Path, dense_bytes: int) -> Prepared:
    """The file of the engine, and the same network for torch and as ONNX."""
    dense = folder / "dense.safetensors"
    checkpoint.save_tensors(dense, tensors, {"graph": json.dumps(graph.as_dict())})
    made, notes = {"sparse": sparse, "torch": dense}, []
    there = [name for name in _ONNX if RUNTIMES[name].version is not None]
    if len(there) < len(_ONNX):
        missing = (name for name in _ONNX if name not in there)
        notes.append(f"not installed, not measured: {', '.join(missing)}")
    if there:
        try:
            write_onnx(folder / "dense.onnx", InTorch(graph, tensors).eval(), torch.rand(2, *graph.input_shape))
            made |= dict.fromkeys(there, folder / "dense.onnx")
        except HarpError as error:
            notes.append(f"not measured: {', '.join(there)}; {error}")
    return Prepared(tuple(graph.input_shape), made, dense_bytes, notes)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(4 * tensor.numel() for tensor in tensors.values())


def _onnx_bytes(path: Path) -> int | None:
    """The bytes of all weights of a file in 32 bit."""
    try:
        import onnx
    except ImportError:
        return None
    initial = onnx.load(str(path), load_external_data=False).graph.initializer
    return sum(4 * int(math.prod(tensor.dims)) for tensor in initial if len(tensor.dims))


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
