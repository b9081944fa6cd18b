"""Networks from compact files, ready to be called: with numpy alone, unless a part of them needs torch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.compact.reader import BadFile, Stored, read_sparse
from harp.errors import CheckpointError
from harp.files import StrPath, reason
from harp.sparse import footprint, native
from harp.sparse.graph import Graph
from harp.sparse.network import Network

GENEROUS = 1 << 34
"""A limit for files that somebody wants to be computed although they are large, and for our own."""


def load(path: StrPath, *, threads: int = 1, limit: int = 1 << 32) -> Network:
    """The network of a file that `harp export --to sparse` wrote.

    It takes images as float32 of shape (N, C, H, W) in [0, 1], of numpy or torch, and gives logits of the same kind.
    `limit` is how many bytes its tensors may take, and about how many a thread may to compute images: one, or as many
    as a vector has lanes. The file is checked as one from a stranger.
    """
    try:
        header, stored = read_sparse(Path(path), limit)
        if "graph" not in header:
            raise BadFile("it holds tensors but no graph; `harp.compact.load` reads those")
        graph = Graph.from_dict(header["graph"])
        graph.check({name: each.shape for name, each in stored.items()})
        footprint.check_taps(graph, {name: len(each.values) for name, each in stored.items()}, limit)
        if graph.needs_torch:
            _check_with_torch(graph, stored)
        network = Network(graph, _tensors(graph, stored, limit), threads=threads, header=header)
        footprint.check(network, limit)
    except (OSError, BadFile) as error:
        raise CheckpointError(f"can't read {path}: {error if isinstance(error, BadFile) else reason(error)}") from error
    return network


def _check_with_torch(graph: Graph, stored: dict[str, Stored]) -> None:
    import torch

    from harp.sparse import reference

    shells = {
        name: torch.empty(each.shape, dtype=reference.dtype(each.values.dtype.name), device="meta")
        for name, each in stored.items()
    }
    reference.check(graph, shells)


def _tensors(graph: Graph, stored: dict[str, Stored], limit: int) -> dict[str, Stored | npt.NDArray[Any]]:
    """Layers' weights as they are stored, everything else in full."""
    sparse = {node.tensors["weight"] for node in graph.nodes if node.op in ("conv", "linear")}
    floats = {name for node in graph.nodes if node.op != "torch" for name in node.tensors.values()}
    for name in floats:
        if stored[name].values.dtype.kind != "f":
            raise BadFile(f"{name!r} is a {stored[name].values.dtype}, layers need floats")
    named = {name: _single(stored[name]) if name in floats else stored[name] for name in graph.tensor_names()}
    full = {name: each for name, each in named.items() if name not in sparse}
    filled = full if native.kernels() is not None else named  # torch computes with all weights, zero or not
    need = sum(math.prod(each.shape) * each.values.itemsize for each in filled.values())
    if need > limit:
        raise BadFile(f"the tensors take {need} bytes, more than the limit of {limit}")
    return {name: _dense(each) if name in full else each for name, each in named.items()}


@np.errstate(over="ignore")  # what is too large for a float32 is infinite
def _single(each: Stored) -> Stored:
    return each._replace(values=each.values.astype(np.float32, copy=False))


def _dense(each: Stored) -> npt.NDArray[Any]:
    if each.indices is None:
        return each.values.reshape(each.shape)
    made = np.zeros(math.prod(each.shape), each.values.dtype)
    made[each.indices] = each.values
    return made.reshape(each.shape)
