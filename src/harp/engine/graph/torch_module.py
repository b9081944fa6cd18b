"""A graph as a module of torch: for attacks, for exporters, and for a comparison with what computes the same graph."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harp.sparse import reference
from harp.sparse.graph import Graph, Node


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
        layers = {name: self.layers[own] for name, own in self._layers.items()}
        return reference.run(self.graph, tensors, x, layers)


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
