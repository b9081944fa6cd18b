"""Single nodes of a graph computed by torch, and their gradients: what the native code does not know."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harp.errors import ModelError
from harp.files import reason
from harp.sparse import reference
from harp.sparse.graph import Node


def tensors_of(node: Node, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a node for torch, in full."""
    return {name: full(tensors[name]) for name in node.tensors.values()}


def full(tensor: Any) -> Tensor:
    """A tensor as it is stored, or an array, as a tensor of torch."""
    if isinstance(tensor, Tensor):
        return tensor
    if isinstance(tensor, tuple):
        shape, indices, values = tensor
        found = np.zeros(shape, values.dtype)
        found.reshape(-1)[slice(None) if indices is None else indices] = values
        return torch.from_numpy(found)
    return torch.from_numpy(np.ascontiguousarray(tensor))


def compute(node: Node, inputs: Sequence[Any], tensors: Mapping[str, Tensor], count: int) -> Tensor:
    """A node's result for so many images; native code relies on its shape."""
    try:
        with torch.no_grad():
            found = reference.step(node, [_plain(each) for each in inputs], tensors, torch.empty(count))
    except Exception as error:  # a function of torch may raise anything
        raise ModelError(f"node {node.name!r:.100} can't be computed: {reason(error):.300}") from error
    if not isinstance(found, Tensor) or tuple(found.shape) != reference.full_shape(node.shape, count):
        raise ModelError(f"node {node.name!r:.100} does not give what it says: {node.shape}")
    return found


def gradients(
    node: Node, inputs: Sequence[Any], tensors: Mapping[str, Tensor], count: int, gradient: Any
) -> list[Tensor | None]:
    """The gradients of a node's inputs, None for those that it does not depend on."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_plain(each).clone() for each in inputs]
        leaves = [each.requires_grad_(each.is_floating_point()) for each in leaves]
        result = reference.step(node, leaves, tensors, torch.empty(count))
        wanted = [each for each in leaves if each.requires_grad]
        if not result.requires_grad or not wanted:
            return [None] * len(leaves)
        found = iter(torch.autograd.grad(result, wanted, _plain(gradient).view_as(result), allow_unused=True))
        return [next(found) if each.requires_grad else None for each in leaves]


def _plain(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array)
