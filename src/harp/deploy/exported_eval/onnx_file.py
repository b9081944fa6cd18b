"""`.onnx` files, computed by ONNX Runtime on the processor."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harp.deploy.exported_eval.query_only import Array
from harp.errors import CheckpointError, MissingExtra, ModelError
from harp.system.files import reason

_QUIET = 4  # ONNX Runtime's log level at which only fatal errors are printed


@dataclass(frozen=True)
class OnnxFile:
    """An opened file: its function, input shape, runtime and external weight files."""

    ask: Callable[[Array], Array]
    shape: tuple[int, int, int]
    runtime: Mapping[str, Any]
    parts: dict[str, str]


def read(path: Path) -> OnnxFile:
    """Open a file, and check that images are its only input."""
    try:
        onnx, onnxruntime = import_module("onnx"), import_module("onnxruntime")
    except ImportError as error:
        raise MissingExtra(f'{path.name} needs ONNX Runtime: pip install "harp-prune[export]"') from error
    try:
        description = onnx.load(path, load_external_data=False)
        opset = max((entry.version for entry in description.opset_import if entry.domain in ("", "ai.onnx")), default=0)
        parts = _parts(path, onnx, description)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except CheckpointError:
        raise
    except Exception as error:  # the file is untrusted: every error means that it is damaged
        raise CheckpointError(f"{path} is damaged or no ONNX model: {reason(error)}") from error
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
        raise ModelError(f"{path.name} has {counts}, expected one of each: images and logits")
    (image_input,) = inputs
    sizes = list(image_input.shape)
    if image_input.type != "tensor(float)":
        raise ModelError(f"{path.name} takes a {image_input.type}, expected float32 images in [0, 1]: tensor(float)")
    if len(sizes) != 4 or not all(isinstance(size, int) and size > 0 for size in sizes[1:]):
        dimensions = " x ".join(map(str, sizes)) or "a single number"
        raise ModelError(f"{path.name} takes an input of {dimensions}, expected images of a fixed size: N x C x H x W")
    fixed = sizes[0] if isinstance(sizes[0], int) and sizes[0] > 0 else None

    def ask(images: Array) -> Array:
        parts = [images[start : start + fixed] for start in range(0, len(images), fixed)] if fixed else [images]
        return np.concatenate([_asked(session, image_input.name, part, fixed) for part in parts])

    runtime = {"onnxruntime": str(onnxruntime.__version__), "provider": session.get_providers()[0], "opset": opset}
    return OnnxFile(ask, (sizes[1], sizes[2], sizes[3]), runtime, parts)


def _asked(session: Any, name: str, images: Array, fixed: int | None) -> Array:
    """The logits of images; where the batch size is fixed, the last image is repeated to fill the batch."""
    count = len(images)
    if fixed is not None and count < fixed:
        images = np.concatenate([images, np.repeat(images[-1:], fixed - count, 0)])
    return np.asarray(session.run(None, {name: images})[0])[:count]


def _parts(path: Path, onnx: Any, description: Any) -> dict[str, str]:
    """The hashes of the model's external weight files, by name."""
    external = [tensor for tensor in _tensors(description.graph) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    names = {entry.value for tensor in external for entry in tensor.external_data if entry.key == "location"}
    hashes = {}
    for name in sorted(names):
        file = path.parent / name
        if file.parent != path.parent:
            raise CheckpointError(f"{path} keeps weights in {name!r}, expected a file beside it")
        try:
            hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(f"can't read {file}, which {path.name} needs: {reason(error)}") from error
    return hashes


def _tensors(graph: Any) -> Iterator[Any]:
    """The tensors of a graph and of the graphs inside it."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
