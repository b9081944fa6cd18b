"""What is done to the nodes of a graph once all are known: folding, merging, leaving out, naming."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from harp.sparse.folds import Fold, bias_name
from harp.sparse.graph import Graph, Node, default_name, mentioned

Nodes = dict[str, Node]


def fold(
    nodes: Nodes, norms: Mapping[str, Fold], output: str, taken: Collection[str]
) -> tuple[Nodes, dict[str, Fold], str]:
    """Put batch norms into the layers before them, where nobody else reads the layer and all its uses agree."""
    readers = _readers(nodes, output)
    behind: dict[str, str] = {}  # the norm that is a layer's only reader
    for name in norms.keys() & nodes.keys():
        layer = nodes[nodes[name].inputs[0]]
        if layer.op in ("conv", "linear") and readers[layer.name] == 1:
            behind[layer.name] = name
    uses: dict[str, list[tuple[str, str]]] = {}
    for node in nodes.values():
        for role, tensor in node.tensors.items():
            uses.setdefault(tensor, []).append((node.name, role))
    folds: dict[str, Fold] = {}
    moved: dict[str, str] = {}
    for weight, users in uses.items():
        layers = [nodes[name] for name, role in users if role == "weight" and name in behind]
        wanted = {replace(norms[behind[layer.name]], bias=layer.tensors.get("bias")) for layer in layers}
        own = bias_name(weight)
        others = {name for name, _ in uses.get(own, [])} - {layer.name for layer in layers}
        foreign = own in taken and any(layer.tensors.get("bias") != own for layer in layers)
        if len(layers) != len(users) or len(wanted) != 1 or others or (foreign and own in uses):
            continue
        (folds[weight],) = wanted
        for layer in layers:
            nodes[layer.name] = replace(layer, tensors={"weight": weight, "bias": own})
            moved[behind[layer.name]] = layer.name
    kept = {name: _rewired(node, moved) for name, node in nodes.items() if name not in moved}
    return kept, folds, moved.get(output, output)


def merged(nodes: Nodes, output: str, derive: Callable[[str, Callable[..., Any], tuple[str, ...]], str]) -> Nodes:
    """Affine maps behind each other as one; `derive` gives a name to a tensor that is computed of others."""
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
    return Counter([output, *(each for node in nodes.values() for each in node.inputs)])


def reachable(nodes: Nodes, output: str) -> Nodes:
    """The nodes that the result depends on, and the input."""
    wanted = {output, "input"}
    for node in reversed(nodes.values()):
        if node.name in wanted:
            wanted.update(node.inputs)
    return {name: node for name, node in nodes.items() if name in wanted}


def _rewired(node: Node, moved: Mapping[str, str]) -> Node:
    """A node that reads from where its inputs have gone."""
    if not moved.keys() & set(node.inputs):
        return node
    inputs = tuple(moved.get(each, each) for each in node.inputs)
    if node.op != "torch":
        return replace(node, inputs=inputs)
    attributes = {key: _substituted(value, moved) for key, value in node.attributes.items()}
    return replace(node, inputs=mentioned(attributes, "node"), attributes=attributes)


def _substituted(argument: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(argument, list):
        return [_substituted(each, moved) for each in argument]
    if isinstance(argument, dict):
        if len(argument) == 1 and isinstance(argument.get("node"), str):
            return {"node": moved.get(argument["node"], argument["node"])}
        return {key: _substituted(value, moved) for key, value in argument.items()}
    return argument


def renamed(nodes: Nodes, output: str) -> Graph:
    """The graph with names that say something: of layers, and of operations with their place."""
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
