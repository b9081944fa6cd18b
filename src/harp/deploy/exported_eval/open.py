"""Files that hold a network, opened to be asked. No file is trusted; what is wrong with one is a line of error."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harp.deployed import onnx_file, sparse_file
from harp.deployed.queried import Queried
from harp.errors import CheckpointError
from harp.files import reason

FORMATS = (".harp", ".onnx")
"""How the names of files end that can be opened."""


@dataclass(frozen=True)
class Artefact:
    """An opened file."""

    path: Path
    sha256: str
    bytes: int
    model: Queried
    runtime: Mapping[str, Any]  # what computes it, with versions
    header: Mapping[str, Any]  # what the file says of itself
    parts: Mapping[str, str]  # sha256 of other files that belong to it
    graph: Callable[[], nn.Module] | None  # makes a network of torch of what the file holds, where that is possible

    def facts(self) -> dict[str, Any]:
        """What a number says of the file that it was measured on."""
        more = {"parts": dict(self.parts)} if self.parts else {}
        name = {"file": self.path.name, "format": self.path.suffix.removeprefix(".")}
        return {**name, "sha256": self.sha256, "bytes": self.bytes, **more, "runtime": dict(self.runtime)}


def is_artefact(target: str) -> bool:
    """Whether a target is meant as a file that holds a deployed network."""
    return target.lower().endswith(FORMATS)


def opened(path: Path) -> Artefact:
    """Open a file by the end of its name."""
    try:
        if path.is_dir():
            raise CheckpointError(f"can't read {path}: it is a folder, expected a {' or '.join(FORMATS)} file")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {reason(error)}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if path.suffix.lower() == ".harp":
        found = sparse_file.read(path)
        parts: dict[str, str] = {}
        header, graph = found.header, found.twin
        ask, shape, runtime = found.ask, found.shape, found.runtime
    else:
        session = onnx_file.read(path)
        parts, header, graph = session.parts, {}, None
        ask, shape, runtime = session.ask, session.shape, session.runtime
    digest = hashlib.sha256(":".join([sha256, *parts.values()]).encode()).hexdigest()
    model = Queried(path.name, ask, digest, shape).eval()
    return Artefact(path, sha256, len(content), model, runtime, header, parts, graph)
