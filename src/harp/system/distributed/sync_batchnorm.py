"""Batch norms whose statistics are those of all processes' images, on every backend.

In train mode a batch norm subtracts the mean of its batch and divides by its deviation. Where a batch is spread over
processes each would take its own part's, and the outcome of a training would depend on how many there are. Within
`synchronised` every batch norm that is computed in train mode takes the statistics of all parts together: with n_i
values a channel of mean m_i and variance v_i in process i, and N of them in all,

    m = Σ n_i m_i / N        v = Σ n_i (v_i + (m_i − m)²) / N

and running statistics move by these, as they would in one process. Parts may have different sizes. Backwards, with x̂
the normalised input and g the gradient of the output,

    ∂x = γ / √(v + ε) · (g − (Σ g + x̂ Σ g x̂) / N)

where the sums go over all processes; the gradients of γ and β stay each process's own, since these are averaged with
those of all other parameters.

torch.nn.SyncBatchNorm does this too, by a module of another class and on GPUs only. Here no module is touched: it is
`torch.nn.functional.batch_norm` that is computed otherwise, for the time of a forward pass, so that whatever calls it
is served, and attacks, checkpoints and exports see the modules as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

_on: ContextVar[bool] = ContextVar("synchronising", default=False)

_WIDE = (torch.float32, torch.float64)  # types whose sums can be trusted


class Synchronised:
    """A forward pass whose batch norms take the statistics of all processes."""

    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Any:
        """What the forward pass gives for this process's part of a batch."""
        with _BatchNorms():
            return self.forward(x)


@contextmanager
def synchronising(on: bool) -> Iterator[None]:
    """For a while, let `beside` give passes over all processes."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def beside(model: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A bare model for a pass beside the training's own, its batch norms as in that."""
    return Synchronised(model) if _on.get() else model


class _BatchNorms(TorchFunctionMode):
    """Catches the batch norms that are computed in train mode."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`, its arguments as they are called there."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    # Each process has a value, so that two have enough: to count them all would let the host wait for the device.
    if (values := dist.get_world_size() * (input.numel() // input.shape[1])) < 2:
        raise ValueError(f"a batch norm needs more than one value a channel, all processes together have {values}")
    count, mean, variance = _statistics(input.detach())
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    exact = input.dtype if input.dtype in _WIDE else torch.float32
    given = count, mean.to(exact), variance.to(exact), eps
    found: Tensor = _Normalised.apply(input, weight, bias, *given)  # type: ignore[no-untyped-call]
    return found


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many values of a channel there are in all processes, their mean and their variance."""
    x = x if x.dtype in _WIDE else x.float()
    if x.device.type == "cpu":
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)  # three times as fast there
    else:
        variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    size = x.numel() // x.shape[1]
    mine = torch.cat([mean.new_full((1,), size, dtype=torch.float64), mean.double(), variance.double()])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    exchanged = torch.stack(parts)
    counts, means, variances = exchanged[:, :1], exchanged[:, 1 : 1 + len(mean)], exchanged[:, 1 + len(mean) :]
    count = counts.sum()
    mean = means[0] + (counts * (means - means[0])).sum(0) / count  # exact where a channel is constant
    variance = (counts * (variances + (means - mean).square())).sum(0) / count
    return count, mean, variance


class _Normalised(torch.autograd.Function):
    """(x − m) / √(v + ε) · γ + β, where m and v are those of all processes' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, count, mean, variance)
        ctx.eps, ctx.shifts = eps, bias is not None
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable  # a second derivative would leave the exchange out in silence
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, count, mean, variance = ctx.saved_tensors
        # As if m and v were constants: γ / √(v + ε) · g, and this process's Σ g x̂ and Σ g.
        given = weight, mean, variance, None, None, False, ctx.eps, (True, True, True)
        back, scaled, plain = torch.ops.aten.native_batch_norm_backward(gradient.contiguous(), x, *given)
        sums = torch.stack([scaled, plain])
        dist.all_reduce(sums)
        slope = torch.rsqrt(variance + ctx.eps)
        factor = slope if weight is None else slope * weight
        tilt = -factor * slope * sums[0] / count
        level = -factor * sums[1] / count - tilt * mean
        shape = [1, -1, *[1] * (x.ndim - 2)]
        back = (back + torch.addcmul(level.view(shape), x, tilt.view(shape))).to(x.dtype)
        own = scaled if weight is not None and ctx.needs_input_grad[1] else None
        return back, own, plain if ctx.shifts and ctx.needs_input_grad[2] else None, None, None, None, None


def share_buffers(model: nn.Module) -> None:
    """Give all processes the first one's buffers, in one message a type."""
    _share(buffer for buffer in model.buffers() if buffer.numel())


@torch.no_grad()
def _share(tensors: Iterable[Tensor]) -> None:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, 0)
        for tensor in alike:
            tensor.copy_(flat[: tensor.numel()].view_as(tensor))
            flat = flat[tensor.numel() :]
