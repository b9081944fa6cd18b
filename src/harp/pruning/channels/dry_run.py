"""Running a model without changing it, and finding the tensors of its output."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def training(model: nn.Module) -> None:
    """Set training mode, except for batch norms, which would update their statistics."""
    for module in model.modules():
        module.training = not isinstance(module, nn.modules.batchnorm._NormBase)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Set eval mode, copies of the buffers and seeded generators, and restore all of them at the end."""
    before = [(module, module.training, module._buffers) for module in model.modules()]
    copies: dict[int, Tensor] = {}
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    try:
        for module, _, buffers in before:
            module.training = False
            copied = {n: None if b is None else copies.setdefault(id(b), b.clone()) for n, b in buffers.items()}
            module._buffers = copied
        with torch.random.fork_rng(list(devices)):
            torch.default_generator.manual_seed(0)
            for device in devices:
                torch.cuda.default_generators[device.index].manual_seed(0)
            yield
    finally:
        for module, flag, buffers in before:
            module.training, module._buffers = flag, buffers


def tensors_of(answer: Any) -> list[Tensor]:
    """The tensors of a model's output, also inside dataclasses and other objects."""
    tensors, waiting, seen = [], [answer], set()
    while waiting:
        for leaf in tree_leaves(waiting.pop(0)):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif not isinstance(leaf, (type, nn.Module)) and id(leaf) not in seen:
                seen.add(id(leaf))
                fields = [field.name for field in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
                waiting.append([*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name) for name in fields)])
    return tensors
