"""Single nodes of a graph, and their gradients, computed by torch: those that the native code can't compute."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harp.engine.graph import reference
from harp.engine.graph.nodes import Node
from harp.errors import ModelError
from harp.system.files import reason


def tensors_of(node: Node, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a node as dense torch tensors."""
    return {name: full(tensors[name]) for name in node.tensors.values()}


def full(tensor: Any) -> Tensor:
    """A stored tensor or an array as a dense torch tensor."""
    if isinstance(tensor, Tensor):
        return tensor
    if isinstance(tensor, tuple):
        shape, indices, values = tensor
        dense = np.zeros(shape, values.dtype)
        dense.reshape(-1)[slice(None) if indices is None else indices] = values
        return torch.from_numpy(dense)
    return torch.from_numpy(np.ascontiguousarray(tensor))


def compute(node: Node, inputs: Sequence[Any], tensors: Mapping[str, Tensor], count: int) -> Tensor:
    """A node's result for `count` images; its shape is checked, as native code relies on it."""
    try:
        with torch.no_grad():
            result = reference.step(node, [_plain(array) for array in inputs], tensors, torch.empty(count))
    except Exception as error:  # a function of torch may raise anything
        raise ModelError(f"node {node.name!r:.100} can't be computed: {reason(error):.300}") from error
    if not isinstance(result, Tensor) or tuple(result.shape) != reference.full_shape(node.shape, count):
        raise ModelError(f"the result of node {node.name!r:.100} does not have the stated shape {node.shape}")
    return result


def gradients(
    node: Node, inputs: Sequence[Any], tensors: Mapping[str, Tensor], count: int, gradient: Any
) -> list[Tensor | None]:
    """The gradients of a node's inputs, None for inputs that the result does not depend on."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_plain(array).clone() for array in inputs]
        leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves]
        result = reference.step(node, leaves, tensors, torch.empty(count))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not result.requires_grad or not wanted:
            return [None] * len(leaves)
        computed = iter(torch.autograd.grad(result, wanted, _plain(gradient).view_as(result), allow_unused=True))
        return [next(computed) if leaf.requires_grad else None for leaf in leaves]


def _plain(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array)
