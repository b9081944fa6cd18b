"""A model as a function of images, and modes that are switched for a while: eval mode, attention step by step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Logits = Callable[[Tensor], Tensor]


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


@contextmanager
def slow_attention() -> Iterator[None]:
    """Keep transformers from their fast path, which is one opaque operation."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
