"""The place in a model where something happens: the line of its own code, or the layer if all code is PyTorch's."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent) + os.sep
_LAYERS = str(Path(__file__).parent / "attention.py")  # belongs to models, though it is in this folder


def running(model: nn.Module) -> str:
    """The place that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return _place(model, _below(frame))


def failing(model: nn.Module, error: BaseException) -> str:
    """The place that raised an error."""
    frames = list(_frames(error.__traceback__))
    outer = max((number for number, (frame, _) in enumerate(frames) if _is_ours(frame)), default=-1)
    return _place(model, reversed(frames[outer + 1 :]))


def _below(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames from the innermost outwards, up to HARP's own code."""
    while frame is not None and not _is_ours(frame):
        yield frame, frame.f_lineno
        frame = frame.f_back


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_HERE) and file != _LAYERS


def _place(model: nn.Module, frames: Iterable[tuple[FrameType, int]]) -> str:
    layer = None
    for frame, line in frames:
        if not frame.f_code.co_filename.startswith((_TORCH, _HERE)):
            return f"{Path(frame.f_code.co_filename).name}:{line}"
        owner = frame.f_locals.get("self")
        layer = layer or (owner if isinstance(owner, nn.Module) else None)
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(layer)) or type(layer or model).__name__
