"""Finds channels that no kept weight reads: they do not change the result.

The search goes from the result backwards. A channel is read if it is an input of a kept weight whose output channel is
read, or if an operation passes it on to a channel that is read. A "torch" node reads all channels.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from harp.engine.graph.nodes import Graph, Node


def read_channels(graph: Graph, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which channels of each node's result are read; `masks` are the masks of the layers' weights, by name."""
    flags = {node.name: torch.zeros(_channels(node), dtype=torch.bool) for node in graph.nodes}
    flags[graph.output][:] = True
    nodes = {node.name: node for node in graph.nodes}
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
                part = read.view(channels, math.prod(nodes[name].shape[1:])).any(1)
            else:
                part = read
            flags[name] |= part
    return flags


def _channels(node: Node) -> int:
    """How many channels a result has. If the batch axis is not in front, only "torch" nodes use the number."""
    return abs(node.shape[0]) if node.shape else 1


def _by_layer(mask: Tensor, read: Tensor, groups: int) -> Tensor:
    """The input channels that a layer reads for the output channels that are read."""
    alive = mask.flatten(2).any(2) if mask.ndim > 2 else mask
    wanted = (alive & read.view(-1, 1)).view(groups, len(mask) // groups, mask.shape[1])
    return wanted.any(1).flatten()
