"""Eval mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode; at exit every module has the training flag it had at entry, whatever happened."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag
