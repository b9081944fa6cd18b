"""From a graph to the few operations of the native code, with activations and sums fused into the products.

A *stage* is a part of the graph that the native code computes as a whole. Torch computes the nodes between stages.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harp.engine.format.reader import Stored
from harp.engine.graph.nodes import Graph, Node, reachable, readers
from harp.engine.lowering import taps
from harp.engine.lowering.taps import Floats, Pair, Size, Taps, Window
from harp.engine.native.bindings import CLAMP, CLIP, LEAKY, LINEAR, RELU

Names = tuple[str | None, str | None]  # of a weight and a bias
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
    """Pixels of x as channels of y. With a stride, a channel is a phase of x: its pixels (i, j), (i + stride, j), ...

    Without one, every pixel of every channel is a channel.
    """

    x: Value
    y: Value
    stride: Pair | None


@dataclass(eq=False)
class MaxPool:
    """The largest number of each window."""

    x: Value
    y: Value
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair


@dataclass(eq=False)
class Concat:
    """Channels one after another."""

    xs: list[Value]
    y: Value

    def parts(self) -> Iterator[tuple[Value, range]]:
        """Each value that is read, and its channels in the result."""
        ends = itertools.accumulate(value.size[0] for value in self.xs)
        return ((value, range(end - value.size[0], end)) for value, end in zip(self.xs, ends, strict=True))


Operation = Product | Split | MaxPool | Concat


@dataclass
class Stage:
    """Operations in their order, the values they read from outside and those read outside, by the nodes' names."""

    operations: list[Operation]
    inputs: dict[str, Value]
    outputs: dict[str, Value]

    def uses(self) -> Counter[Value]:
        """How often each value is read, by operations and outside."""
        return Counter([value for operation in self.operations for value in read(operation)]) + Counter(
            self.outputs.values()
        )


def read(operation: Operation) -> list[Value]:
    """The values that an operation reads."""
    if isinstance(operation, Concat):
        return list(operation.xs)
    summand = operation.summand if isinstance(operation, Product) else None
    return [operation.x] if summand is None else [operation.x, summand]


def stages(graph: Graph, tensors: Mapping[str, Any]) -> list[Stage | Node]:
    """The parts of a graph: stages for the native code, and single nodes for torch."""
    nodes, shapes = reachable(graph.nodes, graph.output)[1:], {node.name: node.shape for node in graph.nodes}
    total = readers(nodes, graph.output)
    parts: list[Stage | Node] = []
    for native, group in itertools.groupby(nodes, lambda node: is_native(node, shapes)):
        part = list(group)
        if native:
            inside = readers(part)
            leaving = [node.name for node in part if total[node.name] > inside[node.name]]
            parts.append(_Lowering(tensors, shapes).stage(part, leaving))
        else:
            parts += part
    return parts


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


def average_window(node: Node, size: Sequence[int]) -> tuple[range, range]:
    """The rows and columns of an average's window that are inside an image of this size for any of its windows."""
    if node.op == "mean":
        return range(size[1]), range(size[2])
    keys = ("kernel", "stride", "padding")
    axes = zip(size[1:], node.shape[1:], *(node.attributes[key] for key in keys), strict=True)
    tall, wide = (
        range(max(0, padding - (outputs - 1) * stride), min(kernel, inputs + padding))
        for inputs, outputs, kernel, stride, padding in axes
    )
    return tall, wide


def _size(shape: Sequence[int]) -> Size:
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (shape[0], 1, 1)


def _pairs(node: Node, *keys: str) -> list[Pair]:
    return [(node.attributes[key][0], node.attributes[key][1]) for key in keys]


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
        self.splits: dict[tuple[Value, Pair | None], Value] = {}

    def stage(self, nodes: list[Node], leaving: list[str]) -> Stage:
        """The stage of some nodes; the results of those in `leaving` are read outside."""
        self.readers = readers(nodes, *leaving)
        for node in nodes:
            inputs = [self._value(name) for name in node.inputs]
            self._name(node.name, getattr(self, f"_{node.op}")(node, *inputs))
            self.waiting.subtract(inputs)
        return Stage(list(self.operations.values()), self.inputs, {name: self.values[name] for name in leaving})

    def _name(self, name: str, value: Value) -> None:
        self.values[name] = value
        self.waiting[value] += self.readers[name]

    def _put(self, operation: Operation) -> Value:
        """Put an operation after all others."""
        self.operations.pop(operation.y, None)
        self.operations[operation.y] = operation
        self.places[operation.y] = next(self.numbers)
        self.taken.update(read(operation))
        return operation.y

    def _value(self, name: str) -> Value:
        if name not in self.values:
            self.inputs[name] = Value(_size(self.shapes[name]))
            self._name(name, self.inputs[name])
        return self.values[name]

    def _product(
        self, x: Value, size: Size, product_taps: Taps, names: Names = (None, None), summand: Value | None = None
    ) -> Value:
        weight, bias = names
        bias_values = None if bias is None else taps.dense(self.tensors[bias])
        return self._put(Product(x, Value(size), product_taps, bias_values, summand, weight, bias))

    def _split(self, x: Value, size: Size, stride: Pair | None) -> Value:
        if (x, stride) not in self.splits:
            self.splits[x, stride] = self._put(Split(x, Value(size), stride))
        return self.splits[x, stride]

    def _convolved(self, x: Value, size: Size, kernel: Stored, window: Window, names: Names = (None, None)) -> Value:
        """A convolution: over the flattened input if the output is one pixel, over phases if there is a stride."""
        if size[1:] == (1, 1) and x.size[1:] != (1, 1):
            return self._product(self._flatten(None, x), size, taps.whole(kernel, x.size, window), names)
        product_taps, (down, right) = taps.convolution(kernel, x.size, window), window.stride
        if window.stride != (1, 1):
            channels, height, width = x.size
            x = self._split(x, (channels * down * right, -(-height // down), -(-width // right)), window.stride)
        return self._product(x, size, product_taps, names)

    def _conv(self, node: Node, x: Value) -> Value:
        name = node.tensors["weight"]
        weight = taps.sparse(self.tensors[name])
        if node.op == "linear":
            weight, window = weight._replace(shape=(*weight.shape, 1, 1)), Window()
        else:
            stride, padding, dilation = _pairs(node, "stride", "padding", "dilation")
            window = Window(stride, padding, dilation, node.attributes["groups"])
        return self._convolved(x, _size(node.shape), weight, window, (name, node.tensors.get("bias")))

    _linear = _conv

    def _affine(self, node: Node, x: Value) -> Value:
        scale, shift = node.tensors["scale"], node.tensors["shift"]
        return self._product(x, x.size, taps.diagonal(taps.dense(self.tensors[scale])), (scale, shift))

    def _avgpool(self, node: Node, x: Value) -> Value:
        channels, kernel, stride, padding = x.size[0], x.size[1:], (1, 1), (0, 0)
        if node.op == "avgpool":
            kernel, stride, padding = _pairs(node, "kernel", "stride", "padding")
        elif kernel == (1, 1):
            return x
        tall, wide = average_window(node, x.size)
        padding = padding[0] - tall.start, padding[1] - wide.start
        number = channels * len(tall) * len(wide)
        values = np.full(number, 1 / math.prod(kernel), np.float32)
        weight = Stored((channels, 1, len(tall), len(wide)), np.arange(number), values)
        return self._convolved(x, _size(node.shape), weight, Window(stride, padding, groups=channels))

    _mean = _avgpool

    def _maxpool(self, node: Node, x: Value) -> Value:
        window = _pairs(node, "kernel", "stride", "padding", "dilation")
        return self._put(MaxPool(x, Value(_size(node.shape)), *window))

    def _flatten(self, _: Node | None, x: Value) -> Value:
        return x if x.size[1:] == (1, 1) else self._split(x, (math.prod(x.size), 1, 1), None)

    def _concat(self, node: Node, *inputs: Value) -> Value:
        return self._put(Concat(list(inputs), Value(_size(node.shape))))

    def _add(self, _: Node, first: Value, second: Value) -> Value:
        open_products = [
            product for value in (first, second) if (product := self._open_product(value)) and product.summand is None
        ]
        if not open_products:
            return self._product(first, first.size, taps.identity(first.size[0]), summand=second)
        target = max(open_products, key=lambda product: self.places[product.y])
        target.summand = first if target.y is second else second
        return self._put(target)  # nothing reads it yet, so it can be moved behind the summand

    def _open_product(self, value: Value) -> Product | None:
        """The product that computes a value, if it can still change: the current node is its only reader."""
        if self.waiting[value] != 1 or value.activation.kind != LINEAR or value in self.taken:
            return None
        operation = self.operations.get(value)
        return operation if isinstance(operation, Product) else None

    def _activated(self, node: Node, x: Value) -> Value:
        if self._open_product(x) is None:
            x = self._product(x, x.size, taps.identity(x.size[0]))
        has = node.attributes
        if node.op == "clip":
            x.activation = Activation(CLAMP if has["inclusive"] else CLIP, has["low"], has["high"])
        else:
            x.activation = Activation(RELU) if node.op == "relu" else Activation(LEAKY, has["slope"])
        return x

    _relu = _leaky = _clip = _activated
