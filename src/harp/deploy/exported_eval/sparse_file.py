"""`.harp` files: the sparse network, and the same graph in torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import harp
from harp.deploy.exported_eval.query_only import Array
from harp.engine import format
from harp.engine.graph.reference import InTorch
from harp.engine.load import GENEROUS, load
from harp.errors import ModelError


@dataclass(frozen=True)
class SparseFile:
    """An opened file: its function, input shape, runtime, metadata and twin."""

    ask: Callable[[Array], Array]
    shape: tuple[int, int, int]
    runtime: Mapping[str, Any]
    header: Mapping[str, Any]
    twin: Callable[[], nn.Module]


def read(path: Path) -> SparseFile:
    """Open a file; its content is untrusted and checked."""
    network = load(path, threads=torch.get_num_threads(), limit=GENEROUS)
    graph, shape = network.graph, network.graph.input_shape
    if len(shape) != 3:
        raise ModelError(f"{path.name} takes inputs of shape {shape}, expected images: (channels, height, width)")

    def ask(images: Array) -> Array:
        return np.asarray(network(images))

    def twin() -> nn.Module:
        return InTorch(graph, format.load(path, GENEROUS)[1])

    runtime = {"harp": harp.__version__, "instructions": network.isa or "torch", "native": network.native_share}
    return SparseFile(ask, (shape[0], shape[1], shape[2]), runtime, network.header, twin)
