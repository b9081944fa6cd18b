"""Passes over the nodes of a captured graph: folding, merging, removing unused nodes, renaming."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from harp.engine.graph.folds import Fold, bias_name
from harp.engine.graph.nodes import Graph, Node, default_name, mentioned

Nodes = dict[str, Node]


def fold(
    nodes: Nodes, norms: Mapping[str, Fold], output: str, taken: Collection[str]
) -> tuple[Nodes, dict[str, Fold], str]:
    """Fold batch norms into the layers before them, if nothing else reads these and all uses of the weight agree."""
    readers = _readers(nodes, output)
    norm_of: dict[str, str] = {}  # the norm that is a layer's only reader
    for name in norms.keys() & nodes.keys():
        layer = nodes[nodes[name].inputs[0]]
        if layer.op in ("conv", "linear") and readers[layer.name] == 1:
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
    readers = _readers(nodes, output)
    left = dict(nodes)
    for name, node in nodes.items():
        before = left[node.inputs[0]] if node.op == "affine" else node
        if before is node or before.op != "affine" or readers[before.name] != 1:
            continue
        names = (before.tensors["scale"], before.tensors["shift"], node.tensors["scale"], node.tensors["shift"])
        scale = derive(f"{name}.scale", lambda a, _b, c, _d: a * c, names)
        shift = derive(f"{name}.shift", lambda _a, b, c, d: b * c + d, names)
        left[name] = replace(node, inputs=before.inputs, tensors={"scale": scale, "shift": shift})
        del left[before.name]
    return left


def _readers(nodes: Mapping[str, Node], output: str) -> Counter[str]:
    return Counter([output, *(name for node in nodes.values() for name in node.inputs)])


def reachable(nodes: Nodes, output: str) -> Nodes:
    """The nodes that the result depends on, and the input."""
    wanted = {output, "input"}
    for node in reversed(nodes.values()):
        if node.name in wanted:
            wanted.update(node.inputs)
    return {name: node for name, node in nodes.items() if name in wanted}


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
