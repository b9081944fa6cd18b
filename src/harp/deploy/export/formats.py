"""The file formats of an export: file names, writers, codings of the sparse file, and what each format needs."""

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harp.deploy.export.source import Source
from harp.engine.capture.capture import Captured, exported, quiet
from harp.engine.format.reader import read
from harp.engine.graph.nodes import Graph
from harp.engine.graph.reference import InTorch
from harp.engine.store import pack
from harp.errors import CheckpointError, MissingExtra, ModelError, RecipeError
from harp.models.modes import slow_attention
from harp.models.weights import save_model
from harp.system.files import reason
from harp.system.nearest import unknown

CODINGS = ("f32", "f16", "int8")
"""How the sparse file may store kept weights."""


def write_onnx(path: Path, model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Write a model as ONNX; return the opset that it uses."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtra('onnx and onnxscript are not installed: pip install "harp-prune[export]"') from error
    with quiet(), slow_attention():
        program = exported(model, images[:2])
        try:
            onnx_program = torch.onnx.export(
                program,
                input_names=["images"],
                output_names=["logits"],
                dynamo=True,
                verbose=False,
                external_data=False,
            )
            if onnx_program is None:  # its type allows it; `dynamo=True` always gives one
                raise ModelError("torch.onnx.export returned nothing")
            content = onnx_program.model_proto
            _name_batch(content.graph)
            onnx.checker.check_model(content, full_check=True)
        except OSError:
            raise
        except Exception as error:  # the exporter's errors have no common class
            raise ModelError(f"ONNX can't hold the model: {reason(error)}") from error
    path.write_bytes(content.SerializeToString())
    return {"opset": max(opset.version for opset in content.opset_import if opset.domain in ("", "ai.onnx"))}


def _name_batch(graph: Any) -> None:
    """Rename the batch dimension from torch's symbol to "batch"."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if symbol and size.dim_param:
                size.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", "batch", size.dim_param)


def _write_program(path: Path, model: nn.Module, images: Tensor) -> dict[str, Any]:
    buffer = io.BytesIO()
    with quiet(), slow_attention():
        torch.export.save(exported(model, images[:2]), buffer)
    path.write_bytes(buffer.getvalue())
    return {"torch": str(torch.__version__)}


def _write_state_dict(path: Path, model: nn.Module, images: Tensor) -> dict[str, Any]:
    save_model(path, model)
    return {}


def packed(captured: Captured, source: Source, header: dict[str, Any], values: str) -> bytes:
    """The content of a sparse file in one coding. Other numbers are stored as f16 too, where they fit."""
    parts = captured.graph, captured.tensors(source.model), source.masks, header, values
    if values == "f32":
        return pack(*parts)
    try:
        return pack(*parts, others="f16")
    except CheckpointError:  # a bias too large for f16
        return pack(*parts, others="f32")


def unpacked(graph: Graph, content: bytes) -> InTorch:
    """The network that a file holds, with its rounded numbers."""
    _, tensors = read(content, limit=1 << 40)
    return InTorch(graph, {name: torch.from_numpy(np.asarray(tensors[name])) for name in graph.tensor_names()}).eval()


@dataclass(frozen=True)
class Format:
    """A format: its file's name, the runtime that checks it, its writer, and the packages that both need."""

    file: str
    runtime: str
    write: Callable[[Path, nn.Module, Tensor], dict[str, Any]] | None  # None: see `packed`
    packages: tuple[str, ...] = ()


FORMATS = {
    "sparse": Format("network.harp", "sparse", None),
    "onnx": Format("network.onnx", "onnxruntime", write_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "safetensors": Format("network.safetensors", "state_dict", _write_state_dict),
    "torch-export": Format("network.pt2", "torch-export", _write_program),
}


def check(names: Sequence[str]) -> None:
    """Refuse unknown formats and formats whose packages are not installed."""
    for name in names:
        if name not in FORMATS:
            raise RecipeError(unknown("format", name, FORMATS))
        missing = [package for package in FORMATS[name].packages if importlib.util.find_spec(package) is None]
        if missing:
            raise MissingExtra(f'--to {name} needs {", ".join(missing)}: pip install "harp-prune[export]"')
