"""A graph computed in torch, node by node: what every faster way is held against, and what serves where there is none.

It is differentiable and works on every device that torch knows.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harp.compact.reader import BadFile
from harp.sparse.allowed import is_allowed, objection
from harp.sparse.graph import Graph, Node

_DROPPED = ("device", "layout", "memory_format", "pin_memory")  # arguments that are no part of what is computed


def run(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    layers: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Tensor:
    """The result of the network for a batch of images; `layers` are what computes some of its nodes instead."""
    results: dict[str, Tensor] = {}
    left, known = _readers(graph), layers or {}
    for node in graph.nodes:
        if node.op == "input":
            results[node.name] = x
        elif node.name in known:
            results[node.name] = known[node.name](results[node.inputs[0]])
        else:
            results[node.name] = step(node, [results[each] for each in node.inputs], tensors, x)
        for each in node.inputs:
            left[each] -= 1
            if left[each] == 0:  # its memory can serve again
                del results[each]
    return results[graph.output]


def step(node: Node, inputs: list[Tensor], tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The result of one node; of the images `x` only the number and the device matter."""
    if node.op == "torch":
        return _call(node, dict(zip(node.inputs, inputs, strict=True)), tensors, x)
    first, has = inputs[0], node.attributes
    match node.op:
        case "conv":
            weight, bias = _weights(node, tensors)
            return F.conv2d(first, weight, bias, has["stride"], has["padding"], has["dilation"], has["groups"])
        case "linear":
            return F.linear(first, *_weights(node, tensors))
        case "affine":
            axes = (-1, *[1] * (first.ndim - 2))
            return first * tensors[node.tensors["scale"]].view(axes) + tensors[node.tensors["shift"]].view(axes)
        case "relu":
            return F.relu(first)
        case "leaky":
            return F.leaky_relu(first, has["slope"])
        case "clip":
            clip = torch.clamp if has["inclusive"] else F.hardtanh  # they differ in the gradient at the bounds
            return clip(first, has["low"], has["high"])
        case "add":
            return first + inputs[1]
        case "concat":
            return torch.cat(inputs, dim=1)
        case "maxpool":
            window = has["kernel"], has["stride"], has["padding"], has["dilation"]
            return F.max_pool2d(first, *window, ceil_mode=has["ceil"])
        case "avgpool":
            sizes = has["kernel"], has["stride"], has["padding"], has["ceil"]
            return F.avg_pool2d(first, *sizes, count_include_pad=has["count_padding"])
        case "mean":
            return first.mean((2, 3), keepdim=has["keep"])
        case "flatten":
            return first.flatten(1)
    raise BadFile(f"the graph has an unknown operation {node.op!r}")


def check(graph: Graph, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a graph whose "torch" nodes are not allowed, or do not give what they say; `BadFile` says why.

    The graph is gone through without numbers, so no node can ask for memory before its size is known.
    """
    for node in graph.nodes:
        if node.op == "torch":
            function(node.attributes["op"])
    shells = {name: torch.empty_like(tensors[name], device="meta") for name in graph.tensor_names()}
    count = 3
    x = torch.empty(count, *graph.input_shape, device="meta")
    results: dict[str, Tensor] = {}
    for node in graph.nodes:
        try:
            result = x if node.op == "input" else step(node, [results[each] for each in node.inputs], shells, x)
        except BadFile:
            raise
        except Exception as error:  # a function of torch may raise anything
            raise BadFile(f"node {node.name!r:.100} can't be computed: {str(error).splitlines()[0]:.200}") from error
        if not isinstance(result, Tensor) or tuple(result.shape) != full_shape(node.shape, count):
            raise BadFile(f"node {node.name!r:.100} does not give what it says: {node.shape}")
        results[node.name] = result


def full_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of a node's result for so many images."""
    if any(size < 0 for size in shape):
        return tuple(-size * count if size < 0 else size for size in shape)
    return (count, *shape)


@cache
def function(name: str) -> Any:
    """A function of aten by its name, "aten.gelu.default"; `BadFile` if there is none or a file must not call it."""
    _, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise BadFile(f"this torch has no function {name}")
    if not is_allowed(found):
        raise BadFile(f"{name} is no function that a network in a file may call")
    return found


def _call(node: Node, nodes: Mapping[str, Tensor], tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    target = function(node.attributes["op"])
    known = nodes, tensors, len(x)
    names = {argument.name for argument in target._schema.arguments}
    where = {"device": x.device} if "device" in names else {}
    kwargs = {key: _value(each, *known) for key, each in node.attributes["kwargs"].items() if key not in _DROPPED}
    args = [_value(each, *known) for each in node.attributes["args"]]
    if wrong := objection(target, args, kwargs):
        raise BadFile(f"node {node.name!r:.100} {wrong}, which no network in a file may do")
    result = target(*args, **kwargs, **where)
    pick = node.attributes["pick"]
    if pick is None:
        return result  # type: ignore[no-any-return]  # a function of torch, its results were checked by the schema
    if not isinstance(result, (tuple, list)) or pick >= len(result):
        raise BadFile(f"node {node.name!r:.100} picks result {pick}, which is not there")
    return result[pick]  # type: ignore[no-any-return]


def _value(argument: Any, nodes: Mapping[str, Tensor], tensors: Mapping[str, Tensor], count: int) -> Any:
    """What an argument stands for. No inner function of `_call`: one that calls itself keeps all results alive."""
    if isinstance(argument, list):
        return [_value(each, nodes, tensors, count) for each in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, what),) = argument.items()
    match kind:
        case "node":
            return nodes[what]
        case "tensor":
            return tensors[what]
        case "batch":
            return what * count
        case "dtype":
            return dtype(what)
    return float(what)


def dtype(name: str) -> torch.dtype:
    """A type of torch by its name, "float32"."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BadFile(f"this torch has no type {name!r:.100}")
    return found


def _weights(node: Node, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return tensors[node.tensors["weight"]], tensors[node.tensors["bias"]] if "bias" in node.tensors else None


def _readers(graph: Graph) -> dict[str, float]:
    counts: dict[str, float] = {node.name: 0 for node in graph.nodes}
    for node in graph.nodes:
        for each in node.inputs:
            counts[each] += 1
    counts[graph.output] = math.inf
    return counts
