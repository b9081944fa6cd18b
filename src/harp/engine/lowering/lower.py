"""From a graph to the few operations of the native code, with activations and sums fused into the products.

A *stage* is a part of the graph that the native code computes as a whole. Torch computes the nodes between stages.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harp.engine.graph.nodes import Graph, Node
from harp.engine.lowering import taps
from harp.engine.lowering.taps import Floats, Taps
from harp.engine.native.bindings import CLAMP, CLIP, LEAKY, LINEAR, RELU

Size = tuple[int, int, int]
_LARGEST_WINDOW = 255  # the position of the largest pixel in a window is stored in a byte


@dataclass(frozen=True)
class Activation:
    """The activation of a product: linear, or piecewise linear with two or three pieces."""

    kind: int = LINEAR
    low: float = 0.0
    high: float = 0.0


@dataclass(eq=False)
class Value:
    """A result of size (channels, height, width), after its activation."""

    size: Size
    activation: Activation = field(default_factory=Activation)


@dataclass(eq=False)
class Product:
    """y = activation(bias + taps · x + summand); `weight` and `bias_name` name the tensors, None for constants."""

    x: Value
    y: Value
    taps: Taps
    bias: Floats | None = None
    summand: Value | None = None
    weight: str | None = None
    bias_name: str | None = None

    def change(self, values: Floats, bias: Floats | None) -> None:
        """Replace the weights and the bias; the positions of the weights stay the same."""
        self.taps = replace(self.taps, values=np.ascontiguousarray(values, np.float32))
        self.bias = None if bias is None else np.ascontiguousarray(bias, np.float32)


@dataclass(eq=False)
class Split:
    """The phases of an input: every phase of x, its pixels (i, j), (i + stride, j), ..., is a channel of y."""

    x: Value
    y: Value
    stride: tuple[int, int]


@dataclass(eq=False)
class Flatten:
    """Every pixel of every channel as a channel of its own."""

    x: Value
    y: Value


@dataclass(eq=False)
class MaxPool:
    """The largest number of each window."""

    x: Value
    y: Value
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@dataclass(eq=False)
class Concat:
    """Channels one after another."""

    xs: list[Value]
    y: Value


Operation = Product | Split | Flatten | MaxPool | Concat


@dataclass
class Stage:
    """Operations in their order, the values they read from outside and those read outside, by the nodes' names."""

    operations: list[Operation]
    inputs: dict[str, Value]
    outputs: dict[str, Value]


def read(operation: Operation) -> list[Value]:
    """The values that an operation reads."""
    if isinstance(operation, Concat):
        return list(operation.xs)
    summand = operation.summand if isinstance(operation, Product) else None
    return [operation.x] if summand is None else [operation.x, summand]


def stages(graph: Graph, tensors: Mapping[str, Any]) -> list[Stage | Node]:
    """The parts of a graph: stages for the native code, and single nodes for torch."""
    needed, shapes = _needed(graph), {node.name: node.shape for node in graph.nodes}
    native = {node.name: node.name in needed and is_native(node, shapes) for node in graph.nodes}
    parts: list[list[Node]] = []
    for node in graph.nodes[1:]:
        if node.name not in needed:
            continue
        if native[node.name] and parts and native[parts[-1][-1].name]:
            parts[-1].append(node)
        else:
            parts.append([node])
    readers = Counter(name for node in graph.nodes if node.name in needed for name in node.inputs)
    readers[graph.output] += 1
    lowered: list[Stage | Node] = []
    for part in parts:
        if native[part[0].name]:
            inside = Counter(name for node in part for name in node.inputs)
            leaving = [node.name for node in part if readers[node.name] > inside[node.name]]
            lowered.append(_Lowering(tensors, shapes).stage(part, leaving))
        else:
            lowered.append(part[0])
    return lowered


def is_native(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the native code can compute a node."""
    attributes = node.attributes
    if node.op == "torch" or not all(len(shapes[name]) in (1, 3) and min(shapes[name]) > 0 for name in node.inputs):
        return False
    if node.op == "maxpool":
        return int(math.prod(attributes["kernel"])) <= _LARGEST_WINDOW
    if node.op == "avgpool":
        return not attributes["ceil"] and bool(attributes["count_padding"] or not any(attributes["padding"]))
    return True


def windows(node: Node, size: Sequence[int]) -> tuple[range, range]:
    """The rows and columns of an average's window that are inside an image of this size for any of its windows."""
    ranges = []
    keys = ("kernel", "stride", "padding")
    axes = zip(size[1:], node.shape[1:], *(node.attributes[key] for key in keys), strict=True)
    for input_length, output_length, kernel, stride, padding in axes:
        ranges.append(range(max(0, padding - (output_length - 1) * stride), min(kernel, input_length + padding)))
    return ranges[0], ranges[1]


def _needed(graph: Graph) -> set[str]:
    needed = {graph.output, graph.nodes[0].name}
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return needed


def _size(shape: Sequence[int]) -> Size:
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (shape[0], 1, 1)


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    return numbers[0], numbers[1]


class _Lowering:
    """Builds one stage."""

    def __init__(self, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.tensors, self.shapes = tensors, shapes
        self.operations: dict[Value, Operation] = {}  # by their results, in their order
        self.places: dict[Value, int] = {}  # the number of each result in that order
        self.numbers = itertools.count()
        self.values: dict[str, Value] = {}
        self.inputs: dict[str, Value] = {}
        self.waiting: Counter[Value] = Counter()  # how many reads of a value are left, under all its names
        self.taken: set[Value] = set()  # values that an operation reads
        self.derived: dict[tuple[Value, tuple[int, int]], Split] = {}
        self.flat: dict[Value, Value] = {}

    def stage(self, nodes: list[Node], leaving: list[str]) -> Stage:
        """The stage of some nodes; the results of those in `leaving` are read outside."""
        self.readers = Counter(name for node in nodes for name in node.inputs)
        self.readers.update(leaving)
        for node in nodes:
            inputs = [self._value(name) for name in node.inputs]
            self._name(node.name, getattr(self, f"_{node.op}")(node, inputs))
            self.waiting.subtract(inputs)
        return Stage(list(self.operations.values()), self.inputs, {name: self.values[name] for name in leaving})

    def _name(self, name: str, value: Value) -> None:
        self.values[name] = value
        self.waiting[value] += self.readers[name]

    def _put(self, operation: Operation) -> None:
        """Put an operation after all others."""
        self.operations.pop(operation.y, None)
        self.operations[operation.y] = operation
        self.places[operation.y] = next(self.numbers)
        self.taken.update(read(operation))

    def _value(self, name: str) -> Value:
        if name not in self.values:
            self.inputs[name] = Value(_size(self.shapes[name]))
            self._name(name, self.inputs[name])
        return self.values[name]

    def _array(self, node: Node, role: str) -> Floats | None:
        if role not in node.tensors:
            return None
        tensor = self.tensors[node.tensors[role]]
        if isinstance(tensor, tuple):
            full = np.zeros(math.prod(tensor[0]), np.float32)
            full[slice(None) if tensor[1] is None else tensor[1]] = tensor[2]
            return full
        return np.ascontiguousarray(tensor, np.float32)

    def _product(
        self, x: Value, size: Size, product_taps: Taps, node: Node | None = None, summand: Value | None = None
    ) -> Value:
        y = Value(size)
        bias = None if node is None else self._array(node, "bias")
        names = {} if node is None else node.tensors
        self._put(Product(x, y, product_taps, bias, summand, names.get("weight"), names.get("bias")))
        return y

    def _flattened(self, x: Value) -> Value:
        if x.size[1:] == (1, 1):
            return x
        if x not in self.flat:
            self.flat[x] = Value((math.prod(x.size), 1, 1))
            self._put(Flatten(x, self.flat[x]))
        return self.flat[x]

    def _convolved(
        self,
        x: Value,
        size: Size,
        weight: taps.Weight,
        node: Node | None,
        *,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> Value:
        """A convolution: over the flattened input if the output is one pixel, over phases if there is a stride."""
        if size[1:] == (1, 1) and x.size[1:] != (1, 1):
            product_taps = taps.whole(weight, x.size, padding, dilation, groups)
            return self._product(self._flattened(x), size, product_taps, node)
        product_taps = taps.convolution(weight, x.size, stride, padding, dilation, groups)
        if stride != (1, 1):
            split = self._split(x, stride)
            x = split.y
        return self._product(x, size, product_taps, node)

    def _split(self, x: Value, stride: tuple[int, int]) -> Split:
        if (x, stride) not in self.derived:
            channels, height, width = x.size
            size = (channels * math.prod(stride), -(-height // stride[0]), -(-width // stride[1]))
            split = self.derived[x, stride] = Split(x, Value(size), stride)
            self._put(split)
        return self.derived[x, stride]

    def _conv(self, node: Node, inputs: list[Value]) -> Value:
        stride, padding, dilation = (_pair(node.attributes[key]) for key in ("stride", "padding", "dilation"))
        weight = taps.weight_of(self.tensors[node.tensors["weight"]])
        return self._convolved(
            inputs[0],
            _size(node.shape),
            weight,
            node,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=node.attributes["groups"],
        )

    def _linear(self, node: Node, inputs: list[Value]) -> Value:
        weight = taps.weight_of(self.tensors[node.tensors["weight"]])
        return self._product(inputs[0], _size(node.shape), taps.linear(weight), node)

    def _affine(self, node: Node, inputs: list[Value]) -> Value:
        scale, shift = self._array(node, "scale"), self._array(node, "shift")
        assert scale is not None
        y = self._product(inputs[0], _size(node.shape), taps.diagonal(scale))
        product = self.operations[y]
        assert isinstance(product, Product)
        product.bias, product.weight, product.bias_name = shift, node.tensors["scale"], node.tensors["shift"]
        return y

    def _avgpool(self, node: Node, inputs: list[Value]) -> Value:
        channels, size = inputs[0].size[0], _size(node.shape)
        kernel, stride, padding = (_pair(node.attributes[key]) for key in ("kernel", "stride", "padding"))
        tall, wide = windows(node, inputs[0].size)
        weight = taps.average(channels, kernel, (len(tall), len(wide)))
        padding = padding[0] - tall.start, padding[1] - wide.start
        return self._convolved(
            inputs[0], size, weight, None, stride=stride, padding=padding, dilation=(1, 1), groups=channels
        )

    def _mean(self, node: Node, inputs: list[Value]) -> Value:
        channels, *kernel = inputs[0].size
        if kernel == [1, 1]:
            return inputs[0]
        weight = taps.average(channels, _pair(kernel))
        return self._convolved(
            inputs[0],
            (channels, 1, 1),
            weight,
            None,
            stride=(1, 1),
            padding=(0, 0),
            dilation=(1, 1),
            groups=channels,
        )

    def _maxpool(self, node: Node, inputs: list[Value]) -> Value:
        y = Value(_size(node.shape))
        window = (_pair(node.attributes[key]) for key in ("kernel", "stride", "padding", "dilation"))
        self._put(MaxPool(inputs[0], y, *window))
        return y

    def _flatten(self, node: Node, inputs: list[Value]) -> Value:
        return self._flattened(inputs[0])

    def _concat(self, node: Node, inputs: list[Value]) -> Value:
        y = Value(_size(node.shape))
        self._put(Concat(inputs, y))
        return y

    def _add(self, node: Node, inputs: list[Value]) -> Value:
        open_products = [
            product for value in inputs if (product := self._open_product(value)) and product.summand is None
        ]
        if open_products:
            target = max(open_products, key=lambda product: self.places[product.y])
            target.summand = inputs[0] if target.y is inputs[1] else inputs[1]
            self._put(target)  # nothing reads it yet, so it can be moved behind the summand
            return target.y
        first, second = inputs
        return self._product(first, first.size, taps.identity(first.size[0]), summand=second)

    def _open_product(self, value: Value) -> Product | None:
        """The product that computes a value, if it can still change: the current node is its only reader."""
        if self.waiting[value] != 1 or value.activation.kind != LINEAR or value in self.taken:
            return None
        operation = self.operations.get(value)
        return operation if isinstance(operation, Product) else None

    def _activated(self, inputs: list[Value], activation: Activation) -> Value:
        (x,) = inputs
        if self._open_product(x) is None:
            x = self._product(x, x.size, taps.identity(x.size[0]))
        x.activation = activation
        return x

    def _relu(self, node: Node, inputs: list[Value]) -> Value:
        return self._activated(inputs, Activation(RELU))

    def _leaky(self, node: Node, inputs: list[Value]) -> Value:
        return self._activated(inputs, Activation(LEAKY, node.attributes["slope"]))

    def _clip(self, node: Node, inputs: list[Value]) -> Value:
        has = node.attributes
        kind = CLAMP if has["inclusive"] else CLIP
        return self._activated(inputs, Activation(kind, has["low"], has["high"]))
