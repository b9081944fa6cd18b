"""Writes a graph and its tensors into a `.harp` file."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harp.engine import format
from harp.engine.graph.nodes import Graph


def pack(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    header: Mapping[str, Any],
    values: str = "f16",
    others: str = "f32",
) -> bytes:
    """The content of a file that `harp.load` reads.

    `masks` are the kept weights; a layer's weight without a mask keeps what is not zero. `values` is the coding of
    kept weights, `others` that of all other tensors, as in `harp.engine.format.write`. Biases of channels that no kept
    weight reads are left out, as they do not change the result.
    """
    kept = {name: masks[name] if name in masks else tensors[name] != 0 for name in _sparse_names(graph, masks)}
    biases = _read_biases(graph, kept)
    stored = {name: tensor.masked_fill(~biases[name].to(tensor.device), 0) if name in biases else tensor
              for name, tensor in tensors.items()}  # fmt: skip
    return format.encode(
        stored, {**kept, **biases}, {**header, "graph": graph.as_dict()}, values, others, precise=biases
    )


def _sparse_names(graph: Graph, masks: Mapping[str, Tensor]) -> list[str]:
    """The tensors that are stored sparsely: the weights of layers, and tensors with a mask."""
    layers = [node.tensors["weight"] for node in graph.nodes if node.op in ("conv", "linear")]
    # Torch computes a linear layer of sequences; its weight is the second argument.
    calls = [node.attributes for node in graph.nodes if node.op == "torch"]
    linear = [call["args"][1].get("tensor") for call in calls if call["op"] == "aten.linear.default"]
    names = graph.tensor_names()
    return list(dict.fromkeys(name for name in [*layers, *linear, *masks] if name in names))


def _read_biases(graph: Graph, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For the biases of layers with unread channels: which of their entries are read."""
    read = read_channels(graph, kept)
    masks: dict[str, Tensor] = {}
    used_otherwise: set[str] = set()
    for node in graph.nodes:
        if node.op not in ("conv", "linear"):
            used_otherwise.update(node.tensors.values())
        elif "bias" in node.tensors:
            name = node.tensors["bias"]
            masks[name] = masks.get(name, torch.zeros_like(read[node.name])) | read[node.name]
    return {name: mask for name, mask in masks.items() if name not in used_otherwise and not bool(mask.all())}


def read_channels(graph: Graph, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which channels of each node's result change the output; `masks` are the masks of the layers' weights, by name.

    The search goes from the output backwards. A channel is read if it is an input of a kept weight whose output channel
    is read, or if an operation passes it on to a channel that is read. A "torch" node reads all channels.
    """
    shapes = {node.name: node.shape for node in graph.nodes}
    # If the batch axis is not in front, only "torch" nodes use the number of channels.
    flags = {name: torch.zeros(abs(shape[0]) if shape else 1, dtype=torch.bool) for name, shape in shapes.items()}
    flags[graph.output][:] = True
    for node in reversed(graph.nodes):
        read = flags[node.name]
        offset = 0
        for name in node.inputs:
            channels = len(flags[name])
            if node.op == "torch":
                part = torch.ones(channels, dtype=torch.bool)
            elif node.op in ("conv", "linear"):
                part = _by_layer(masks[node.tensors["weight"]].cpu(), read, node.attributes.get("groups", 1))
            elif node.op == "concat":
                part, offset = read[offset : offset + channels], offset + channels
            elif node.op == "flatten":
                part = read.view(channels, math.prod(shapes[name][1:])).any(1)
            else:
                part = read
            flags[name] |= part
    return flags


def _by_layer(mask: Tensor, read: Tensor, groups: int) -> Tensor:
    """The input channels that a layer reads for the output channels that are read."""
    alive = mask.flatten(2).any(2) if mask.ndim > 2 else mask
    wanted = (alive & read.view(-1, 1)).view(groups, len(mask) // groups, mask.shape[1])
    return wanted.any(1).flatten()
