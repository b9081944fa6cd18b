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
def untouched(model: nn.Module) -> Iterator[None]:
    """Set eval mode, copies of the buffers and seeded generators, and restore all of them at the end.

    What `torch.compile` has made of the model is left aside: operations are watched and modules changed meanwhile.
    """
    before = [(module, module._buffers) for module in model.modules()]
    copies: dict[int, Tensor] = {}
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    with evaluating(model), torch.random.fork_rng(list(devices)), torch.compiler.set_stance("force_eager"):
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(0)
        try:
            for module, buffers in before:
                module._buffers = {
                    name: None if buffer is None else copies.setdefault(id(buffer), buffer.clone())
                    for name, buffer in buffers.items()
                }
            yield
        finally:
            for module, buffers in before:
                module._buffers = buffers


@contextmanager
def slow_attention() -> Iterator[None]:
    """Keep transformers from their fast path, which is one opaque operation."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
