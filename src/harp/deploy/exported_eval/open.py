"""Open files that hold a network. Files are untrusted; a damaged one is a one-line error."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harp.deploy.exported_eval import onnx_file, sparse_file
from harp.deploy.exported_eval.query_only import Queried
from harp.errors import CheckpointError
from harp.system.files import reason

FORMATS = (".harp", ".onnx")
"""Suffixes of the files that can be opened."""


@dataclass(frozen=True)
class Artefact:
    """An opened file."""

    path: Path
    sha256: str
    bytes: int
    model: Queried
    runtime: Mapping[str, Any]  # the runtime that computes it, with versions
    header: Mapping[str, Any]  # the file's own metadata
    parts: Mapping[str, str]  # sha256 of other files that belong to it
    graph: Callable[[], nn.Module] | None  # builds a torch network from the file, where that is possible

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
    if path.suffix.lower() == ".harp":
        sparse = sparse_file.read(path)
        parts: dict[str, str] = {}
        header, graph = sparse.header, sparse.twin
        ask, shape, runtime = sparse.ask, sparse.shape, sparse.runtime
    else:
        session = onnx_file.read(path)
        parts, header, graph = session.parts, {}, None
        ask, shape, runtime = session.ask, session.shape, session.runtime
    digest = hashlib.sha256(":".join([sha256, *parts.values()]).encode()).hexdigest()
    model = Queried(path.name, ask, digest, shape).eval()
    return Artefact(path, sha256, len(content), model, runtime, header, parts, graph)
