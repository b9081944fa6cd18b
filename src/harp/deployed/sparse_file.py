"""`.harp` files: the network that computes with the weights it keeps, and the same graph in torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import harp
from harp import compact
from harp.deployed.queried import Array
from harp.errors import ModelError
from harp.sparse import reference
from harp.sparse.graph import Graph, Node
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


class InTorch(nn.Module):
    """A graph as a network of torch, with gradients: the twin of whatever computes the same graph.

    Convolutions and linear layers are modules, so that attacks may lay out their memory; the rest is computed as
    `harp.sparse.reference` does.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        shared = {name: _frozen(tensors[name]) for name in graph.tensor_names()}
        layers = [node for node in graph.nodes if node.op in ("conv", "linear")]
        self.layers = nn.ModuleDict({str(number): _layer(node, shared) for number, node in enumerate(layers)})
        self._layers = {node.name: str(number) for number, node in enumerate(layers)}
        rest = [node for node in graph.nodes if node.name not in self._layers]
        names = dict.fromkeys(name for node in rest for name in node.tensors.values())
        self._names = {name: f"tensor{number}" for number, name in enumerate(names)}
        for name, own in self._names.items():
            self.register_buffer(own, shared[name].data)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images."""
        tensors = {name: getattr(self, own) for name, own in self._names.items()}
        results = {self.graph.nodes[0].name: x}
        for node in self.graph.nodes[1:]:
            inputs = [results[name] for name in node.inputs]
            if node.name in self._layers:
                results[node.name] = self.layers[self._layers[node.name]](inputs[0])
            else:
                results[node.name] = reference.step(node, inputs, tensors, x)
        return results[self.graph.output]


def _layer(node: Node, tensors: Mapping[str, nn.Parameter]) -> nn.Module:
    """The module of a layer, with the tensors themselves: a weight that two layers share is one."""
    weight = tensors[node.tensors["weight"]]
    bias = tensors[node.tensors["bias"]] if "bias" in node.tensors else None
    has = node.attributes
    with torch.device("meta"):
        if node.op == "linear":
            made: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        else:
            made = nn.Conv2d(
                weight.shape[1] * has["groups"],
                weight.shape[0],
                (weight.shape[2], weight.shape[3]),
                tuple(has["stride"]),
                tuple(has["padding"]),
                tuple(has["dilation"]),
                has["groups"],
                bias is not None,
            )
    made.register_parameter("weight", weight)
    made.register_parameter("bias", bias)
    return made


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
