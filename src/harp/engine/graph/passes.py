"""Passes over the nodes of a captured graph: folding batch norms into the layers before them, merging, renaming.

γ (Wx + b − μ) / √(σ² + ε) + β  =  (sW) x + s (b − μ) + β      with  s = γ / √(σ² + ε)
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harp.engine.graph.nodes import Graph, Node, default_name, mentioned, readers

Nodes = dict[str, Node]


@dataclass(frozen=True)
class Fold:
    """A batch norm folded into a layer: the names of its tensors in the model's state, None for missing ones."""

    bias: str | None
    scale: str | None
    shift: str | None
    mean: str
    variance: str
    epsilon: float


def folded(weight: str, fold: Fold, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The weight and bias of one layer that computes a layer and the norm behind it."""
    scale, shift = normed(fold, get)
    whole = get(weight)
    bias = shift if fold.bias is None else shift + scale * get(fold.bias)
    return {weight: whole * scale.reshape(-1, *[1] * (whole.ndim - 1)), bias_name(weight): bias}


def normed(fold: Fold, get: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """The scale and the shift of a batch norm, by channel."""
    mean, variance = get(fold.mean), get(fold.variance)
    scale = torch.rsqrt(variance + fold.epsilon)
    scale = scale if fold.scale is None else scale * get(fold.scale)
    shift = -mean * scale
    return scale, shift if fold.shift is None else shift + get(fold.shift)


def bias_name(weight: str) -> str:
    """The name of the bias that belongs to a weight."""
    return f"{weight.removesuffix('.weight')}.bias"


def fold(
    nodes: Nodes, norms: Mapping[str, Fold], output: str, taken: Collection[str]
) -> tuple[Nodes, dict[str, Fold], str]:
    """Fold batch norms into the layers before them, if nothing else reads these and all uses of the weight agree."""
    read_by = readers(nodes.values(), output)
    norm_of: dict[str, str] = {}  # the norm that is a layer's only reader
    for name in norms.keys() & nodes.keys():
        layer = nodes[nodes[name].inputs[0]]
        if layer.op in ("conv", "linear") and read_by[layer.name] == 1:
            norm_of[layer.name] = name
    uses: dict[str, list[tuple[str, str]]] = {}
    for node in nodes.values():
        for role, tensor in node.tensors.items():
            uses.setdefault(tensor, []).append((node.name, role))
    folds: dict[str, Fold] = {}
    moved: dict[str, str] = {}
    for weight, users in uses.items():
        layers = [nodes[name] for name, role in users if role == "weight" and name in norm_of]
        wanted = {replace(norms[norm_of[layer.name]], bias=layer.tensors.get("bias")) for layer in layers}
        own = bias_name(weight)
        others = {name for name, _ in uses.get(own, [])} - {layer.name for layer in layers}
        foreign = own in taken and any(layer.tensors.get("bias") != own for layer in layers)
        if len(layers) != len(users) or len(wanted) != 1 or others or (foreign and own in uses):
            continue
        (folds[weight],) = wanted
        for layer in layers:
            nodes[layer.name] = replace(layer, tensors={"weight": weight, "bias": own})
            moved[norm_of[layer.name]] = layer.name
    kept = {name: _rewired(node, moved) for name, node in nodes.items() if name not in moved}
    return kept, folds, moved.get(output, output)


def merged(nodes: Nodes, output: str, derive: Callable[[str, Callable[..., Any], tuple[str, ...]], str]) -> Nodes:
    """Merge consecutive affine maps; `derive` names a tensor that is computed from others."""
    read_by = readers(nodes.values(), output)
    left = dict(nodes)
    for name, node in nodes.items():
        before = left[node.inputs[0]] if node.op == "affine" else node
        if before is node or before.op != "affine" or read_by[before.name] != 1:
            continue
        names = (before.tensors["scale"], before.tensors["shift"], node.tensors["scale"], node.tensors["shift"])
        scale = derive(f"{name}.scale", lambda a, _b, c, _d: a * c, names)
        shift = derive(f"{name}.shift", lambda _a, b, c, d: b * c + d, names)
        left[name] = replace(node, inputs=before.inputs, tensors={"scale": scale, "shift": shift})
        del left[before.name]
    return left


def _rewired(node: Node, moved: Mapping[str, str]) -> Node:
    """A node with the new names of its inputs."""
    if not moved.keys() & set(node.inputs):
        return node
    inputs = tuple(moved.get(name, name) for name in node.inputs)
    if node.op != "torch":
        return replace(node, inputs=inputs)
    attributes = {key: _substituted(value, moved) for key, value in node.attributes.items()}
    return replace(node, inputs=mentioned(attributes, "node"), attributes=attributes)


def _substituted(argument: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(argument, list):
        return [_substituted(item, moved) for item in argument]
    if isinstance(argument, dict):
        if len(argument) == 1 and isinstance(argument.get("node"), str):
            return {"node": moved.get(argument["node"], argument["node"])}
        return {key: _substituted(value, moved) for key, value in argument.items()}
    return argument


def renamed(nodes: Nodes, output: str) -> Graph:
    """The graph with readable names: those of the layers, or the operation and its position."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for index, node in enumerate(nodes.values()):
        name = default_name(node.op, index, node.tensors)
        while name in taken:
            name = f"{name}_{index}"
        taken.add(name)
        names[node.name] = name
    placed = tuple(replace(_rewired(node, names), name=names[node.name]) for node in nodes.values())
    return Graph(placed, names[output])
