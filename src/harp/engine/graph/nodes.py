"""A network as plain data: a list of nodes, each with an operation, its inputs and its tensors.

A graph is small enough for the header of a file. It can be executed without torch, unless it has a "torch" node. All
shapes are those of one image, without the batch axis; if the batch axis of a "torch" node's result is not in front, its
shape lists all axes, and -k stands for k times the number of images. docs/reference/format.md
describes the operations with their attributes, and the arguments of "torch" nodes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harp.engine.format.reader import BadFile

Shape = tuple[int, ...]

# The attributes of every operation with their defaults; an attribute whose default is None is required.
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "input": {},
    "conv": {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1},
    "linear": {},
    "affine": {},
    "relu": {},
    "leaky": {"slope": 0.01},
    "clip": {"low": None, "high": None, "inclusive": False},
    "add": {},
    "concat": {},
    "maxpool": {"kernel": None, "stride": None, "padding": [0, 0], "dilation": [1, 1], "ceil": False},
    "avgpool": {"kernel": None, "stride": None, "padding": [0, 0], "ceil": False, "count_padding": True},
    "mean": {"keep": False},
    "flatten": {},
    "torch": {"op": None, "args": [], "kwargs": {}, "pick": None},
}
_TENSORS = {"conv": ("weight", "bias"), "linear": ("weight", "bias"), "affine": ("scale", "shift")}
_LAYERS = ("conv", "linear")
_STATED = ("input", "conv", "linear", "torch")  # their shapes don't follow from the inputs alone, so a file states them

_LARGEST = 1 << 28  # numbers of a result for one image
_LONGEST = 1 << 20  # of a kernel, a stride, a name
_MOST = 10_000  # nodes
_DEEPEST = 8  # lists within lists of arguments
_ATEN = re.compile(r"aten\.[A-Za-z0-9_]{1,100}\.[A-Za-z0-9_]{1,100}")


@dataclass(frozen=True)
class Node:
    """One operation with its inputs, the shape of its result, its tensors and its attributes."""

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: Shape
    tensors: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of execution, the first of which is the input; and the name of the output node."""

    nodes: tuple[Node, ...]
    output: str

    @property
    def input_shape(self) -> Shape:
        """The shape of one image."""
        return self.nodes[0].shape

    @property
    def needs_torch(self) -> bool:
        """Whether a node needs torch."""
        return any(node.op == "torch" for node in self.nodes)

    def tensor_names(self) -> list[str]:
        """The names of all tensors that the nodes use, without duplicates, in the order of their use."""
        return list(dict.fromkeys(name for node in self.nodes for name in node.tensors.values()))

    def as_dict(self) -> dict[str, Any]:
        """The graph as JSON, without entries that follow from the others."""
        nodes = [_entry(node, index, self.nodes) for index, node in enumerate(self.nodes)]
        return {"nodes": nodes} if self.output == self.nodes[-1].name else {"nodes": nodes, "output": self.output}

    @classmethod
    def from_dict(cls, content: Any) -> "Graph":
        """The graph of `as_dict`. The content is not trusted: `BadFile` says what is wrong with it."""
        _demand(isinstance(content, dict) and isinstance(content.get("nodes"), list), "the graph has no list of nodes")
        entries = content["nodes"]
        _demand(0 < len(entries) <= _MOST, f"the graph has {len(entries)} nodes: 1 to {_MOST} are allowed")
        nodes: dict[str, Node] = {}
        for index, entry in enumerate(entries):
            node = _node(entry, index, nodes)
            nodes[node.name] = node
        output = content.get("output", next(reversed(nodes)))
        _demand(isinstance(output, str) and output in nodes, f"the graph's output {output!r:.100} is none of its nodes")
        return cls(tuple(nodes.values()), output)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise `BadFile` if the tensors are missing or their shapes are not what the nodes need."""
        before: dict[str, Node] = {}
        for node in self.nodes:
            for name in node.tensors.values():
                _demand(name in shapes, f"node {node.name!r} needs a tensor {name!r}, which is not there")
            if node.op in _TENSORS:
                tensors = {role: tuple(shapes[name]) for role, name in node.tensors.items()}
                _check_tensors(node, before[node.inputs[0]].shape, tensors)
            before[node.name] = node


def reachable(nodes: Sequence[Node], output: str) -> list[Node]:
    """The nodes that the result depends on, and the input."""
    wanted = {output, nodes[0].name}
    for node in reversed(nodes):
        if node.name in wanted:
            wanted.update(node.inputs)
    return [node for node in nodes if node.name in wanted]


def readers(nodes: Iterable[Node], *outputs: str) -> Counter[str]:
    """How often the results are read, by nodes and as outputs."""
    return Counter([*outputs, *(name for node in nodes for name in node.inputs)])


def result_shape(op: str, attributes: Mapping[str, Any], inputs: Sequence[Shape]) -> Shape | None:
    """The shape of an operation's result, None if it does not follow from its inputs; `BadFile` if there is none."""
    if op in _STATED:
        return None
    first = inputs[0]
    if op in ("maxpool", "avgpool"):
        window = [attributes[key] for key in ("kernel", "stride", "padding")]
        dilation = attributes.get("dilation", [1, 1])
        sizes = zip(first[1:], *window, dilation, strict=True)
        return (first[0], *(_windows(*axis, ceil=attributes["ceil"]) for axis in sizes))
    if op == "mean":
        return (first[0], 1, 1) if attributes["keep"] else first[:1]
    if op == "flatten":
        return (math.prod(first),)
    if op == "concat":
        _demand(len({shape[1:] for shape in inputs}) == 1, "concat of shapes that do not fit")
        return (sum(shape[0] for shape in inputs), *first[1:])
    if op == "add":
        _demand(inputs[0] == inputs[1], f"add of shapes {inputs[0]} and {inputs[1]}")
    return first


def complete(op: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """All attributes of an operation, with the defaults of missing ones."""
    return {**_ATTRIBUTES[op], **attributes}


def mentioned(attributes: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """The names in {kind: name} objects of a "torch" node's arguments, without duplicates, in order."""
    arguments = [*attributes["args"], *attributes["kwargs"].values()]
    return tuple(dict.fromkeys(_references(arguments, kind)))


def _references(arguments: Any, kind: str) -> Iterator[str]:
    if isinstance(arguments, list):
        for argument in arguments:
            yield from _references(argument, kind)
    elif isinstance(arguments, dict) and kind in arguments and len(arguments) == 1:
        yield arguments[kind]


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool = False) -> int:
    """How many windows fit; in ceil mode the last one may reach over the edge, but must start inside."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    _demand(room >= 0, f"a window of {kernel} does not fit into {size} with padding {padding}")
    count = (-(-room // stride) if ceil else room // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def default_name(op: str, index: int, tensors: Mapping[str, str]) -> str:
    """The name of a node that has none of its own: that of its layer, or its operation and index."""
    weight = tensors.get("weight", "") if op in _LAYERS else ""
    return weight.removesuffix(".weight") if weight.endswith(".weight") else f"{op}{index}"


def _entry(node: Node, index: int, nodes: tuple[Node, ...]) -> dict[str, Any]:
    """A node as JSON, without names, inputs, tensors and attributes that are the default ones."""
    entry: dict[str, Any] = {"op": node.op}
    usual = {"weight": f"{node.name}.weight", "bias": f"{node.name}.bias"}
    if node.op in _LAYERS and dict(node.tensors) == usual:
        entry["name"] = node.name
    else:
        if node.name != default_name(node.op, index, node.tensors):
            entry["name"] = node.name
        if node.tensors and node.op != "torch":
            entry["tensors"] = dict(node.tensors)
    if node.op not in ("input", "torch") and node.inputs != (nodes[index - 1].name,):
        entry["inputs"] = list(node.inputs)
    if node.op in _STATED:
        entry["shape"] = list(node.shape)
    defaults = _ATTRIBUTES[node.op]
    attributes = {key: value for key, value in node.attributes.items() if value != defaults[key]}
    return entry | ({"attributes": attributes} if attributes else {})


def _node(entry: Any, index: int, earlier: dict[str, Node]) -> Node:
    _demand(isinstance(entry, dict), f"node {index} of the graph is no object")
    op = entry.get("op")
    known = isinstance(op, str) and op in _ATTRIBUTES
    _demand(known, f"node {index} of the graph has an unknown operation {op!r:.100}")
    _demand((op == "input") == (index == 0), "the graph's first node, and no other, is its input")
    attributes = _checked_attributes(op, entry.get("attributes", {}))
    name, tensors = _name_and_tensors(entry, op, index, attributes)
    _demand(name not in earlier, f"two nodes of the graph are called {name!r:.100}")
    inputs = _inputs(entry, op, attributes, earlier)
    shapes = [earlier[source].shape for source in inputs]
    if op not in ("input", "torch"):
        fits = all(len(shape) in (1, 3) and min(shape) > 0 for shape in shapes)
        _demand(fits, f"{name!r:.100} can't read its inputs")
        if op in ("conv", "maxpool", "avgpool", "mean"):
            _demand(len(shapes[0]) == 3, f"{name!r:.100} needs channels, height and width, not {shapes[0]}")
    return Node(name, op, inputs, _shape(entry, op, attributes, shapes), tensors, attributes)


def _name_and_tensors(entry: Any, op: str, index: int, attributes: dict[str, Any]) -> tuple[str, dict[str, str]]:
    name, tensors = entry.get("name"), entry.get("tensors")
    _demand(name is None or _is_name(name), f"node {index} of the graph has no proper name")
    if op == "torch":
        tensors = {tensor: tensor for tensor in mentioned(attributes, "tensor")}
    elif tensors is None:
        _demand(op not in _LAYERS or name is not None, f"node {index} of the graph has no name")
        tensors = {"weight": f"{name}.weight", "bias": f"{name}.bias"} if op in _LAYERS else {}
    roles = _TENSORS.get(op, ())
    fits = isinstance(tensors, dict) and all(map(_is_name, tensors.values()))
    needed = set(roles) - ({"bias"} if op in _LAYERS else set())
    fits = fits and (op == "torch" or needed <= tensors.keys() <= set(roles))
    _demand(fits, f"node {index} of the graph ({op}) does not have the tensors that it needs")
    return name if name is not None else default_name(op, index, tensors), dict(tensors)


def _inputs(entry: Any, op: str, attributes: dict[str, Any], earlier: dict[str, Node]) -> tuple[str, ...]:
    if op == "input":
        return ()
    inputs = mentioned(attributes, "node") if op == "torch" else entry.get("inputs", [next(reversed(earlier))])
    proper = isinstance(inputs, (list, tuple)) and all(isinstance(name, str) and name in earlier for name in inputs)
    _demand(proper, f"a node of the graph ({op}) reads what no earlier node gives")
    fits = {"concat": 1 <= len(inputs) <= _MOST, "torch": True, "add": len(inputs) == 2}.get(op, len(inputs) == 1)
    _demand(fits, f"a node of the graph ({op}) has {len(inputs)} inputs")
    return tuple(inputs)


def _shape(entry: Any, op: str, attributes: dict[str, Any], inputs: list[Shape]) -> Shape:
    inferred = result_shape(op, attributes, inputs)
    sizes = entry.get("shape", None if inferred is None else list(inferred))
    low = -_LARGEST if op == "torch" else 1
    proper = isinstance(sizes, list) and len(sizes) <= 16 and all(type(n) is int and n >= low for n in sizes)
    _demand(proper, f"a node of the graph ({op}) has no proper shape")
    numbers = math.prod(max(abs(n), 1) for n in sizes)
    _demand(numbers <= _LARGEST, f"a node of the graph ({op}) is too large: {sizes}")
    shape = tuple(sizes)
    _demand(inferred is None or shape == inferred, f"a node of the graph ({op}) says {shape}, but it gives {inferred}")
    if op == "conv":
        groups = attributes["groups"]
        _demand(len(shape) == 3 and shape[0] % groups == 0 == inputs[0][0] % groups, f"conv gives no shape {shape}")
    if op == "linear":
        _demand(len(shape) == len(inputs[0]) == 1, f"linear can't turn {inputs[0]} into {shape}")
    _demand(op != "input" or shape, "the graph's input has no shape")
    return shape


def _checked_attributes(op: str, entry: Any) -> dict[str, Any]:
    defaults = _ATTRIBUTES[op]
    _demand(isinstance(entry, dict) and entry.keys() <= defaults.keys(), f"a node ({op}) has attributes it can't have")
    attributes = complete(op, entry)
    for key, value in attributes.items():
        _demand(_PROPER[key](value), f"a node of the graph ({op}) has {key} {value!r:.100}")
    if op == "clip":
        _demand(attributes["low"] <= attributes["high"], "a node of the graph (clip) has low above high")
    if op in ("maxpool", "avgpool"):
        fits = all(2 * pad <= size for pad, size in zip(attributes["padding"], attributes["kernel"], strict=True))
        _demand(fits, f"a node of the graph ({op}) pads more than half a window")
    return attributes


def _check_tensors(node: Node, input_shape: Shape, tensors: Mapping[str, Shape]) -> None:
    channels = node.shape[0]
    if node.op == "affine":
        for role, shape in tensors.items():
            _demand(shape == (channels,), f"{node.tensors[role]!r} is of shape {shape}, not {(channels,)}")
        return
    weight, bias = tensors["weight"], tensors.get("bias")
    wanted, kernel = (channels, input_shape[0] // node.attributes.get("groups", 1)), weight[2:]
    axes = 2 if node.op == "conv" else 0
    fits = weight[:2] == wanted and len(kernel) == axes and all(0 < n < _LONGEST for n in kernel)
    name = node.tensors["weight"]
    _demand(fits, f"{name!r} is of shape {weight}, which does not turn {input_shape} into {node.shape}")
    _demand(bias in (None, (channels,)), f"{node.tensors.get('bias')!r} is of shape {bias}, not {(channels,)}")
    if node.op == "conv":
        window = [node.attributes[key] for key in ("stride", "padding", "dilation")]
        computed = tuple(_windows(*axis) for axis in zip(input_shape[1:], kernel, *window, strict=True))
        _demand(computed == node.shape[1:], f"node {node.name!r} says {node.shape[1:]}, but it gives {computed}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST


def _is_pair(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == 2 and all(_is_count(n, low) for n in value)


def _is_count(value: Any, low: int = 1) -> bool:
    return type(value) is int and low <= value < _LONGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_argument(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list):
        return depth < _DEEPEST and all(_is_argument(item, depth + 1) for item in value)
    if isinstance(value, dict):
        kind, content = next(iter(value.items()), (None, None))
        named = kind in ("node", "tensor", "dtype", "float") and _is_name(content)
        return len(value) == 1 and (_is_count(content) if kind == "batch" else named)
    return value is None or isinstance(value, (bool, int, str)) or _is_number(value)


_PROPER: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("stride", "dilation", "kernel"), _is_pair(1)),
    "padding": _is_pair(0),
    "groups": _is_count,
    **dict.fromkeys(("slope", "low", "high"), _is_number),
    **dict.fromkeys(("inclusive", "ceil", "count_padding", "keep"), lambda value: type(value) is bool),
    "op": lambda value: isinstance(value, str) and _ATEN.fullmatch(value) is not None,
    "args": lambda value: isinstance(value, list) and _is_argument(value),
    "kwargs": lambda value: isinstance(value, dict) and all(map(_is_argument, value.values())),
    "pick": lambda value: value is None or (type(value) is int and 0 <= value < 1000),
}


def _demand(holds: object, otherwise: str) -> None:
    if not holds:
        raise BadFile(otherwise)
