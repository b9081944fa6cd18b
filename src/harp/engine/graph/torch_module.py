"""A graph as a torch module: for attacks, for exporters, and for comparisons with other implementations."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harp.engine.graph import reference
from harp.engine.graph.nodes import Graph, Node


class InTorch(nn.Module):
    """A graph as a torch network with gradients.

    Convolutions and linear layers are modules, so that attacks can choose their memory layout;
    `harp.engine.graph.reference` computes the rest.
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
        layers = {name: self.layers[own] for name, own in self._layers.items()}
        return reference.run(self.graph, tensors, x, layers)


def _layer(node: Node, tensors: Mapping[str, nn.Parameter]) -> nn.Module:
    """The module of a layer, with the given tensors and not copies: two layers may share a weight."""
    weight = tensors[node.tensors["weight"]]
    bias = tensors[node.tensors["bias"]] if "bias" in node.tensors else None
    attributes = node.attributes
    with torch.device("meta"):
        if node.op == "linear":
            layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        else:
            layer = nn.Conv2d(
                weight.shape[1] * attributes["groups"],
                weight.shape[0],
                (weight.shape[2], weight.shape[3]),
                tuple(attributes["stride"]),
                tuple(attributes["padding"]),
                tuple(attributes["dilation"]),
                attributes["groups"],
                bias is not None,
            )
    layer.register_parameter("weight", weight)
    layer.register_parameter("bias", bias)
    return layer


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
