"""Loads networks from `.harp` files. It needs numpy only, unless the network has nodes that torch computes."""

import math
import os
from pathlib import Path

import numpy as np

from harp.engine import footprint
from harp.engine.format.reader import BadFile, Stored, read_sparse
from harp.engine.graph.nodes import Graph
from harp.engine.native import bindings
from harp.engine.network import Network
from harp.errors import CheckpointError
from harp.system import hub
from harp.system.files import StrPath, reason

GENEROUS = 1 << 34
"""A higher limit, in bytes, for our own files and for users who allow large ones."""


def load(path: StrPath, *, threads: int = 1, limit: int = 1 << 32) -> Network:
    """The network of a file that `harp export --to sparse` wrote.

    It takes images as float32 of shape (N, C, H, W) in [0, 1], as an array or a torch tensor, and returns logits of the
    same type. The file is not trusted: its content is checked.

    Arguments:
        path: the file, or `hf:OWNER/NAME`, what `harp push` wrote to a hub.
        threads: how many threads compute at once.
        limit: how many bytes the tensors may take, and about how many a thread may take for a group of images.

    Example:
        network = harp.load("network.harp", threads=2)
        logits = network(images)
    """
    path = hub.fetch(os.fspath(path)) / hub.SPARSE if hub.is_name(os.fspath(path)) else path
    try:
        header, stored = read_sparse(Path(path), limit)
        if "graph" not in header:
            raise BadFile("it holds tensors but no graph; `harp.engine.format.load` reads those")
        graph = Graph.from_dict(header["graph"])
        graph.check({name: tensor.shape for name, tensor in stored.items()})
        footprint.check_taps(graph, {name: len(tensor.values) for name, tensor in stored.items()}, limit)
        if graph.needs_torch:
            from harp.engine.graph import reference  # loads torch

            reference.check(graph, stored)
        network = Network(graph, _tensors(graph, stored, limit), threads=threads, header=header)
        footprint.check(network, limit)
    except (OSError, BadFile) as error:
        raise CheckpointError(f"can't read {path}: {error if isinstance(error, BadFile) else reason(error)}") from error
    return network


def _tensors(graph: Graph, stored: dict[str, Stored], limit: int) -> dict[str, Stored]:
    """The tensors of a graph, those of layers in float32."""
    sparse = {node.tensors["weight"] for node in graph.nodes if node.op in ("conv", "linear")}
    floats = {name for node in graph.nodes if node.op != "torch" for name in node.tensors.values()}
    for name in floats:
        if stored[name].values.dtype.kind != "f":
            raise BadFile(f"{name!r} is a {stored[name].values.dtype}, layers need floats")
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite
        single = {name: stored[name]._replace(values=stored[name].values.astype(np.float32)) for name in floats}
    tensors = {name: single.get(name, stored[name]) for name in graph.tensor_names()}
    # Torch needs all weights as dense tensors.
    dense = [tensor for name, tensor in tensors.items() if name not in sparse or bindings.kernels() is None]
    need = sum(math.prod(tensor.shape) * tensor.values.itemsize for tensor in dense)
    if need > limit:
        raise BadFile(f"the tensors take {need} bytes, more than the limit of {limit}")
    return tensors
