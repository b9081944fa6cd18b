"""Open files that hold a network. Files are untrusted; a damaged one is a one-line error."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import harp
from harp.data.dataset import TOLERANCE
from harp.deploy.runtimes import onnx_session
from harp.engine import format
from harp.engine.graph.reference import InTorch
from harp.engine.load import GENEROUS, load
from harp.errors import CheckpointError, DataError, HarpError, MissingExtra, ModelError
from harp.system.files import reason

FORMATS = (".harp", ".onnx")
"""Suffixes of the files that can be opened."""

Array = npt.NDArray[Any]


class Queried(nn.Module):
    """Images in [0, 1] to logits, by a function of arrays; there is no gradient.

    Arguments:
        name: its name in errors.
        ask: computes one row of logits for each of float32 images (N, C, H, W).
        digest: hexadecimal hash of all bytes that the logits depend on. It is the module's only tensor, so that
            different files have different fingerprints.
        shape: the shape of one image.
    """

    digest: Tensor

    def __init__(self, name: str, ask: Callable[[Array], Array], digest: str, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.name, self.ask, self.shape = name, ask, shape
        self.register_buffer("digest", torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8))
        logits = self._asked(np.full((2, *shape), 0.5, np.float32))
        if logits.ndim != 2 or len(logits) != 2 or logits.shape[1] < 2 or logits.dtype.kind != "f":
            actual = f"{logits.dtype} of shape {logits.shape}"
            raise ModelError(f"{name} gives {actual} for two images, expected floats of shape (2, classes)")
        self.classes = int(logits.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """The logits; images outside [0, 1] or of another shape raise `DataError`."""
        if len(x) == 0:
            return x.new_zeros(0, self.classes)
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"{self.name} takes images of shape {self.shape}, not {tuple(x.shape[1:])}")
        low, high = (float(value) for value in torch.aminmax(x.detach()))
        if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
            raise DataError(f"{self.name} takes images in [0, 1], not [{low:g}, {high:g}]")
        images = x.detach().clamp(0, 1).to("cpu", torch.float32).contiguous().numpy()
        return torch.from_numpy(np.ascontiguousarray(self._asked(images))).to(x)

    def _asked(self, images: Array) -> Array:
        try:
            return self.ask(images)
        except HarpError:
            raise
        except Exception as error:  # a runtime may raise anything
            raise ModelError(f"{self.name} can't be computed: {reason(error)}") from error


@dataclass(frozen=True)
class Artefact:
    """An opened file."""

    path: Path
    sha256: str
    bytes: int
    model: Queried
    runtime: Mapping[str, Any] = field(default_factory=dict)  # the runtime that computes it, with versions
    header: Mapping[str, Any] = field(default_factory=dict)  # the file's own metadata
    parts: Mapping[str, str] = field(default_factory=dict)  # sha256 of other files that belong to it
    in_torch: Callable[[], nn.Module] | None = None  # builds a torch network from the file, where that is possible

    def facts(self) -> dict[str, Any]:
        """The description of the file in a result."""
        more = {"parts": dict(self.parts)} if self.parts else {}
        name = {"file": self.path.name, "format": self.path.suffix.removeprefix(".")}
        return {**name, "sha256": self.sha256, "bytes": self.bytes, **more, "runtime": dict(self.runtime)}


def is_artefact(target: str) -> bool:
    """Whether a target names a file of a deployed network."""
    return target.lower().endswith(FORMATS)


def opened(path: Path) -> Artefact:
    """Open a file; the suffix decides the format."""
    try:
        if path.is_dir():
            raise CheckpointError(f"can't read {path}: it is a folder, expected a {' or '.join(FORMATS)} file")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {reason(error)}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    return (_open_sparse if path.suffix.lower() == ".harp" else _open_onnx)(path, sha256, len(content))


def _open_sparse(path: Path, sha256: str, size: int) -> Artefact:
    network = load(path, threads=torch.get_num_threads(), limit=GENEROUS)
    graph, shape = network.graph, network.graph.input_shape
    if len(shape) != 3:
        raise ModelError(f"{path.name} takes inputs of shape {shape}, expected images: (channels, height, width)")
    runtime = {"harp": harp.__version__, "instructions": network.isa or "torch", "native": network.native_share}
    digest = hashlib.sha256(sha256.encode()).hexdigest()
    model = Queried(path.name, lambda images: np.asarray(network(images)), digest, (shape[0], shape[1], shape[2]))

    def in_torch() -> nn.Module:
        return InTorch(graph, format.load(path, GENEROUS)[1])

    return Artefact(path, sha256, size, model.eval(), runtime, network.header, in_torch=in_torch)


def _open_onnx(path: Path, sha256: str, size: int) -> Artefact:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise MissingExtra(f'{path.name} needs ONNX Runtime: pip install "harp-prune[export]"') from error
    try:
        description = onnx.load(path, load_external_data=False)
        opset = max((entry.version for entry in description.opset_import if entry.domain in ("", "ai.onnx")), default=0)
        parts = _external_files(path, onnx, description)
        session = onnx_session(path, torch.get_num_threads())
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
        step = fixed or len(images)
        batches = [images[start : start + step] for start in range(0, len(images), step)]
        return np.concatenate([compute(batch, step) for batch in batches])

    def compute(batch: Array, step: int) -> Array:
        """Logits; where the batch size is fixed, the last image is repeated to fill the batch."""
        full = np.concatenate([batch, np.repeat(batch[-1:], step - len(batch), 0)])
        return np.asarray(session.run(None, {image_input.name: full})[0])[: len(batch)]

    digest = hashlib.sha256(":".join([sha256, *parts.values()]).encode()).hexdigest()
    model = Queried(path.name, ask, digest, (sizes[1], sizes[2], sizes[3])).eval()
    runtime = {"onnxruntime": str(onnxruntime.__version__), "provider": session.get_providers()[0], "opset": opset}
    return Artefact(path, sha256, size, model, runtime, parts=parts)


def _external_files(path: Path, onnx: Any, description: Any) -> dict[str, str]:
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
