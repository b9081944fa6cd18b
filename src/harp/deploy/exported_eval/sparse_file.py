"""`.harp` files: the network that computes with the weights it keeps, and the same graph in torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import harp
from harp import compact
from harp.deployed.queried import Array
from harp.errors import ModelError
from harp.sparse.in_torch import InTorch
from harp.sparse.loading import GENEROUS, load


@dataclass(frozen=True)
class SparseFile:
    """What a file computes, and how."""

    ask: Callable[[Array], Array]
    shape: tuple[int, int, int]
    runtime: Mapping[str, Any]
    header: Mapping[str, Any]
    twin: Callable[[], nn.Module]


def read(path: Path) -> SparseFile:
    """Read a file; it is checked as one from a stranger."""
    network = load(path, threads=torch.get_num_threads(), limit=GENEROUS)
    graph, shape = network.graph, network.graph.input_shape
    if len(shape) != 3:
        raise ModelError(f"{path.name} takes inputs of shape {shape}, expected images: (channels, height, width)")

    def ask(images: Array) -> Array:
        return np.asarray(network(images))

    def twin() -> nn.Module:
        return InTorch(graph, compact.load(path, GENEROUS)[1])

    runtime = {"harp": harp.__version__, "instructions": network.isa or "torch", "native": network.native_share}
    return SparseFile(ask, (shape[0], shape[1], shape[2]), runtime, network.header, twin)
