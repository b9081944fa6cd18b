"""What a model is called with: a tensor, several tensors in order, or several by name; nested, as loaders give them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Inputs = Any
"""A tensor; a tuple or list, whose entries are the arguments of the call; or a mapping, whose entries are named."""


def ask(model: Callable[..., Any], inputs: Inputs) -> Any:
    """The model's answer to inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same nested tuples, lists and mappings with a function of each tensor; what else they hold stays."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        values = [mapped(function, value) for value in tree]
        if isinstance(tree, list):
            return values
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and mappings, in order."""
    found: list[Tensor] = []
    mapped(found.append, tree)
    return found


def rows(tree: Any) -> int | None:
    """The number of examples: the length that all tensors have in common; None if they have none."""
    lengths = {len(tensor) if tensor.ndim else -1 for tensor in tensors(tree)}
    length = lengths.pop() if len(lengths) == 1 else -1
    return None if length < 0 else length


def first_rows(tree: Any, count: int) -> Any:
    """The first examples, detached; all that there is where the tensors have no common length."""
    several = rows(tree) is not None
    return mapped(lambda tensor: (tensor[:count] if several else tensor).detach(), tree)


def copied(tree: Any, like: Tensor | None = None) -> Any:
    """A copy of all tensors; with `like` on its device, and floating point numbers in its precision."""

    def copy(tensor: Tensor) -> Tensor:
        if like is None:
            return tensor.detach().clone()
        return tensor.detach().clone().to(like if tensor.is_floating_point() else like.device)

    return mapped(copy, tree)


def described(tree: Any) -> str:
    """The kind and shape of inputs in a few words, for messages."""
    if isinstance(tree, Tensor):
        return f"shape {tuple(tree.shape)}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {described(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(described(value) for value in tree) + ")"
    return type(tree).__name__
