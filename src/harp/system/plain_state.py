"""States that consist of plain values, which can be loaded without running code from the file."""

import torch
from torch import Tensor

# Exact types, because a subclass pickles as a class (numpy's float64 is a subclass of float).
PLAIN = (bool, int, float, str, type(None))


def plain_state(value: object, where: str) -> object:
    """`value` in plain containers; a TypeError says where it is not plain.

    A tensor that is a view of a larger one is copied, because the file would hold all of the larger one otherwise.
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"{where} is not a dense tensor with values")
        fills_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return tensor if fills_storage else tensor.clone()
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        for key in value:
            if type(key) not in PLAIN:
                raise TypeError(f"{where} has the key {key!r}; keys are numbers or strings")
        return {key: plain_state(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [plain_state(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise TypeError(f"{where} is a {type(value).__name__}; only tensors, numbers, strings, lists and dicts are kept")


def size_of(value: object) -> int:
    """The approximate size of a plain state in a file, in bytes."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() + 500  # for its name and position
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 20
