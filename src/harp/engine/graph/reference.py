"""The reference implementation of a graph: torch computes it node by node.

Faster implementations are compared with it, and the engine uses it for nodes that the native code can't compute. It is
differentiable and works on every device of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.engine.format.reader import BadFile, Stored
from harp.engine.graph.allowed_calls import is_allowed, objection
from harp.engine.graph.nodes import Graph, Node, readers
from harp.errors import ModelError
from harp.system.files import reason

_DROPPED = ("device", "layout", "memory_format", "pin_memory")  # arguments that do not change the result


def run(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    layers: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Tensor:
    """The network's result for a batch of images; functions in `layers` replace the nodes of their names."""
    results: dict[str, Tensor] = {}
    reads_left, replaced = readers(graph.nodes, graph.output), layers or {}
    for node in graph.nodes:
        if node.op == "input":
            results[node.name] = x
        elif node.name in replaced:
            results[node.name] = replaced[node.name](results[node.inputs[0]])
        else:
            results[node.name] = step(node, [results[name] for name in node.inputs], tensors, x)
        for name in node.inputs:
            reads_left[name] -= 1
            if reads_left[name] == 0:  # free the memory
                del results[name]
    return results[graph.output]


def step(node: Node, inputs: list[Tensor], tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The result of one node; only the number and the device of the images `x` are used."""
    if node.op == "torch":
        return _call(node, dict(zip(node.inputs, inputs, strict=True)), tensors, x)
    first, attributes = inputs[0], node.attributes
    match node.op:
        case "conv":
            weight, bias = _weights(node, tensors)
            geometry = (attributes[key] for key in ("stride", "padding", "dilation", "groups"))
            return F.conv2d(first, weight, bias, *geometry)
        case "linear":
            return F.linear(first, *_weights(node, tensors))
        case "affine":
            axes = (-1, *[1] * (first.ndim - 2))
            return first * tensors[node.tensors["scale"]].view(axes) + tensors[node.tensors["shift"]].view(axes)
        case "relu":
            return F.relu(first)
        case "leaky":
            return F.leaky_relu(first, attributes["slope"])
        case "clip":
            clip = torch.clamp if attributes["inclusive"] else F.hardtanh  # they differ in the gradient at the bounds
            return clip(first, attributes["low"], attributes["high"])
        case "add":
            return first + inputs[1]
        case "concat":
            return torch.cat(inputs, dim=1)
        case "maxpool":
            window = attributes["kernel"], attributes["stride"], attributes["padding"], attributes["dilation"]
            return F.max_pool2d(first, *window, ceil_mode=attributes["ceil"])
        case "avgpool":
            sizes = attributes["kernel"], attributes["stride"], attributes["padding"], attributes["ceil"]
            return F.avg_pool2d(first, *sizes, count_include_pad=attributes["count_padding"])
        case "mean":
            return first.mean((2, 3), keepdim=attributes["keep"])
        case "flatten":
            return first.flatten(1)
    raise BadFile(f"the graph has an unknown operation {node.op!r}")


def tensor(array: Any) -> Tensor:
    """A stored tensor or an array as a dense torch tensor."""
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(array.dense() if isinstance(array, Stored) else np.asarray(array))


def compute(node: Node, inputs: Sequence[Any], tensors: Mapping[str, Tensor], count: int) -> Tensor:
    """A node's result for `count` images; its shape is checked, as native code relies on it."""
    with torch.no_grad():
        return _checked_step(node, list(map(tensor, inputs)), tensors, torch.empty(count), ModelError)


def gradients(
    node: Node, inputs: Sequence[Any], tensors: Mapping[str, Tensor], count: int, gradient: Any
) -> list[Tensor | None]:
    """The gradients of a node's inputs, None for inputs that the result does not depend on."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [tensor(array).clone() for array in inputs]
        leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves]
        result = step(node, leaves, tensors, torch.empty(count))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not result.requires_grad or not wanted:
            return [None] * len(leaves)
        computed = iter(torch.autograd.grad(result, wanted, tensor(gradient).view_as(result), allow_unused=True))
        return [next(computed) if leaf.requires_grad else None for leaf in leaves]


def check(graph: Graph, tensors: Mapping[str, Stored]) -> None:
    """Raise `BadFile` if a "torch" node is not allowed, or if its result does not have the stated shape.

    The graph is run on meta tensors, so that no node can allocate memory before its size is known.
    """
    for node in graph.nodes:
        if node.op == "torch":
            function(node.attributes["op"])
    used = {name: tensors[name] for name in graph.tensor_names()}
    types = {name: dtype(tensor.values.dtype.name) for name, tensor in used.items()}
    meta = {name: torch.empty(tensor.shape, dtype=types[name], device="meta") for name, tensor in used.items()}
    x = torch.empty(3, *graph.input_shape, device="meta")
    results = {graph.nodes[0].name: x}
    for node in graph.nodes[1:]:
        results[node.name] = _checked_step(node, [results[name] for name in node.inputs], meta, x, BadFile)


def _checked_step(
    node: Node, inputs: list[Tensor], tensors: Mapping[str, Tensor], x: Tensor, problem: type[Exception]
) -> Tensor:
    """The result of a node, or a `problem` if it can't be computed or does not have the stated shape."""
    try:
        result = step(node, inputs, tensors, x)
    except BadFile:
        raise
    except Exception as error:  # a function of torch may raise anything
        raise problem(f"node {node.name!r:.100} can't be computed: {reason(error):.300}") from error
    if any(size < 0 for size in node.shape):  # the batch axis is not in front
        shape = tuple(-size * len(x) if size < 0 else size for size in node.shape)
    else:
        shape = (len(x), *node.shape)
    if not isinstance(result, Tensor) or tuple(result.shape) != shape:
        raise problem(f"the result of node {node.name!r:.100} does not have the stated shape {node.shape}")
    return result


@cache
def function(name: str) -> Any:
    """An aten function by its name, like "aten.gelu.default"; `BadFile` if it does not exist or is not allowed."""
    _, packet, overload = name.split(".")
    target = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(target, torch._ops.OpOverload):
        raise BadFile(f"this torch has no function {name}")
    if not is_allowed(target):
        raise BadFile(f"{name} is no function that a network in a file may call")
    return target


def _call(node: Node, nodes: Mapping[str, Tensor], tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    target = function(node.attributes["op"])
    context = nodes, tensors, len(x)
    names = {argument.name for argument in target._schema.arguments}
    where = {"device": x.device} if "device" in names else {}
    kwargs = {key: _value(value, *context) for key, value in node.attributes["kwargs"].items() if key not in _DROPPED}
    args = [_value(value, *context) for value in node.attributes["args"]]
    if reason := objection(target, args, kwargs):
        raise BadFile(f"node {node.name!r:.100} {reason}, which is not allowed for a network in a file")
    result = target(*args, **kwargs, **where)
    pick = node.attributes["pick"]
    if pick is None:
        return result  # type: ignore[no-any-return]  # a function of torch, its results were checked by the schema
    if not isinstance(result, (tuple, list)) or pick >= len(result):
        raise BadFile(f"node {node.name!r:.100} picks result {pick}, which is not there")
    return result[pick]  # type: ignore[no-any-return]


def _value(argument: Any, nodes: Mapping[str, Tensor], tensors: Mapping[str, Tensor], count: int) -> Any:
    """The value of an argument. It is not nested in `_call`: a recursive closure would keep all results alive."""
    if isinstance(argument, list):
        return [_value(item, nodes, tensors, count) for item in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, content),) = argument.items()
    match kind:
        case "node":
            return nodes[content]
        case "tensor":
            return tensors[content]
        case "batch":
            return content * count
        case "dtype":
            return dtype(content)
    return float(content)


def dtype(name: str) -> torch.dtype:
    """A torch type by its name, like "float32"."""
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise BadFile(f"this torch has no type {name!r:.100}")
    return value


def _weights(node: Node, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return tensors[node.tensors["weight"]], tensors[node.tensors["bias"]] if "bias" in node.tensors else None


class InTorch(nn.Module):
    """A graph as a torch network with gradients.

    Convolutions and linear layers are modules, so that attacks can choose their memory layout;
    `run` computes the rest.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        shared = {name: nn.Parameter(tensors[name], requires_grad=False) for name in graph.tensor_names()}
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
        return run(self.graph, tensors, x, layers)


def _layer(node: Node, tensors: Mapping[str, nn.Parameter]) -> nn.Module:
    """The module of a layer, with the given tensors and not copies: two layers may share a weight."""
    weight, attributes = tensors[node.tensors["weight"]], node.attributes
    bias = tensors[node.tensors["bias"]] if "bias" in node.tensors else None
    with torch.device("meta"):
        if node.op == "linear":
            layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0])
        else:
            (outputs, inputs, *kernel), groups = weight.shape, attributes["groups"]
            window: dict[str, Any] = {key: tuple(attributes[key]) for key in ("stride", "padding", "dilation")}
            layer = nn.Conv2d(inputs * groups, outputs, (kernel[0], kernel[1]), groups=groups, **window)
    layer.register_parameter("weight", weight)
    layer.register_parameter("bias", bias)
    return layer
