"""States of plain values: what is read back from a file without running anything that is in it."""

import torch
from torch import Tensor

# What is saved for resuming; exact types, because a subclass (numpy's float64 is a float) pickles as a class.
PLAIN = (bool, int, float, str, type(None))


def plain_state(value: object, where: str) -> object:
    """`value` in plain containers, each tensor on its own, or a TypeError that says where it is not plain."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"{where} is not a dense tensor with values")
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return tensor if whole else tensor.clone()  # else the file would get all that it is a part of
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
    """About how many bytes a plain state takes in a file."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() + 500  # its name and place
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 20
