"""Channels that no kept weight reads: whatever they are, the result is the same.

From the result backwards: a channel is read if a kept weight of a channel that is read reads it, or an operation that
hands channels on. What torch computes may read everything.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from harp.sparse.graph import Graph, Node


def read_channels(graph: Graph, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which channels of each node's result are read; `masks` are those of the layers' weights, by name."""
    found = {node.name: torch.zeros(_channels(node), dtype=torch.bool) for node in graph.nodes}
    found[graph.output][:] = True
    nodes = {node.name: node for node in graph.nodes}
    for node in reversed(graph.nodes):
        read = found[node.name]
        offset = 0
        for name in node.inputs:
            channels = len(found[name])
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
            found[name] |= part
    return found


def _channels(node: Node) -> int:
    """How many channels a result has; of one that has its batch axis elsewhere nobody asks."""
    return abs(node.shape[0]) if node.shape else 1


def _by_layer(mask: Tensor, read: Tensor, groups: int) -> Tensor:
    """The input channels that a layer reads for the output channels that are read."""
    alive = mask.flatten(2).any(2) if mask.ndim > 2 else mask
    wanted = (alive & read.view(-1, 1)).view(groups, len(mask) // groups, mask.shape[1])
    return wanted.any(1).flatten()
