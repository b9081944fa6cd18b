"""Running a model without changing it, the tensors of its output, and the line of its code that runs or fails."""

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harp.models import inputs

_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = (
    str(Path(__file__).parent.parent) + os.sep
)  # all of pruning: the operations are watched from outside this folder
_LAYERS = str(Path(__file__).parent / "attention.py")  # its code belongs to models, though it is in this folder


def training(model: nn.Module) -> None:
    """Set training mode, except for batch norms, which would update their statistics."""
    for module in model.modules():
        module.training = not isinstance(module, nn.modules.batchnorm._NormBase)


def tensors_of(answer: Any) -> list[Tensor]:
    """The tensors of a model's output, also inside dataclasses and other objects."""
    tensors, waiting, seen = [], [answer], set()
    while waiting:
        for leaf in tree_leaves(waiting.pop(0)):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif isinstance(leaf, Mapping):  # a class of its own, which torch takes for a leaf
                waiting.append(list(leaf.values()))
            elif not isinstance(leaf, (type, nn.Module)) and id(leaf) not in seen:
                seen.add(id(leaf))
                fields = [field.name for field in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
                waiting.append([*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name) for name in fields)])
    return tensors


def first_line(error: Exception) -> str:
    """An error in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def running_line(model: nn.Module) -> str:
    """The line of the model's own code that is being executed, or the layer if all code is PyTorch's."""
    frames = dropwhile(lambda pair: _is_ours(pair[0]), walk_stack(sys._getframe(1)))
    return _place(model, takewhile(lambda pair: not _is_ours(pair[0]), frames))


def failing_line(model: nn.Module, error: BaseException) -> str:
    """The line of the model's own code that raised an error, or the layer if all code is PyTorch's."""
    frames = list(walk_tb(error.__traceback__))
    outer = max((number for number, (frame, _) in enumerate(frames) if _is_ours(frame)), default=-1)
    return _place(model, reversed(frames[outer + 1 :]))


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return (file.startswith(_HERE) and file != _LAYERS) or file == inputs.__file__


def _place(model: nn.Module, frames: Iterable[tuple[FrameType, int]]) -> str:
    """The place of the innermost of some frames that is not PyTorch's."""
    layer = None
    for frame, line in frames:
        if not frame.f_code.co_filename.startswith((_TORCH, _HERE)):
            return f"{Path(frame.f_code.co_filename).name}:{line}"
        owner = frame.f_locals.get("self")
        layer = layer or (owner if isinstance(owner, nn.Module) else None)
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(layer)) or type(layer or model).__name__
