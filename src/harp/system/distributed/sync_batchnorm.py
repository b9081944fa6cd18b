"""Batch norm with statistics over the images of all processes, on every backend.

In train mode a batch norm subtracts the mean of its batch and divides by its standard deviation. If a batch is
distributed over processes and each of them uses the statistics of its own part, the result of a training depends on the
number of processes. `Synchronised` uses the statistics of all parts together: with n_i values per channel of mean m_i
and variance v_i in process i, and N values in all,

    m = Σ n_i m_i / N        v = Σ n_i (v_i + (m_i − m)²) / N

The running statistics are updated with these, as in a single process. Parts may have different sizes. In the backward
pass, with x̂ the normalised input and g the gradient of the output,

    ∂x = γ / √(v + ε) · (g − (Σ g + x̂ Σ g x̂) / N)

where the sums are over all processes. The gradients of γ and β stay those of each process, because they are averaged
later with the gradients of all other parameters.

torch.nn.SyncBatchNorm does the same, but replaces the modules and works on GPUs only. Here no module is changed:
`torch.nn.functional.batch_norm` is replaced during a forward pass, so that every caller of it is covered and attacks,
checkpoints and exports see the original modules.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

_enabled: ContextVar[bool] = ContextVar("synchronising", default=False)

_ACCUMULATING = (torch.float32, torch.float64)  # types that are precise enough to sum in


class Synchronised:
    """A forward pass whose batch norms use the statistics of all processes."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The output for the part of a batch that this process has."""
        with _BatchNorms():
            return self.forward(*inputs, **named)


@contextmanager
def synchronising(on: bool) -> Iterator[None]:
    """Inside this context, `beside` synchronises batch norms if `on`."""
    token = _enabled.set(on)
    try:
        yield
    finally:
        _enabled.reset(token)


def beside(model: Callable[..., Any]) -> Callable[..., Any]:
    """A model for an additional forward pass during training, with batch norms like in the main pass."""
    return Synchronised(model) if _enabled.get() else model


class _BatchNorms(TorchFunctionMode):
    """Replaces `torch.nn.functional.batch_norm` by `_batch_norm`."""

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
    """`torch.nn.functional.batch_norm` with the statistics of all processes in train mode, and the same arguments."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    # Every process has at least one value, so this estimate from the own part is enough for the check. Reading the
    # exact count would make the host wait for the device.
    if (values := dist.get_world_size() * (input.numel() // input.shape[1])) < 2:
        raise ValueError(f"a batch norm needs more than one value a channel, all processes together have {values}")
    count, mean, variance = _statistics(input.detach())
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    dtype = input.dtype if input.dtype in _ACCUMULATING else torch.float32
    statistics = count, mean.to(dtype), variance.to(dtype), eps
    output: Tensor = _Normalise.apply(input, weight, bias, *statistics)  # type: ignore[no-untyped-call]
    return output


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of values of a channel in all processes, their mean and their variance."""
    x = x if x.dtype in _ACCUMULATING else x.float()
    if x.device.type == "cpu":
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)  # three times as fast on a CPU
    else:
        variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    size = x.numel() // x.shape[1]
    own = torch.cat([mean.new_full((1,), size, dtype=torch.float64), mean.double(), variance.double()])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    gathered = torch.stack(parts)
    counts, means, variances = gathered[:, :1], gathered[:, 1 : 1 + len(mean)], gathered[:, 1 + len(mean) :]
    count = counts.sum()
    mean = means[0] + (counts * (means - means[0])).sum(0) / count  # relative to the first: exact for equal means
    variance = (counts * (variances + (means - mean).square())).sum(0) / count
    return count, mean, variance


class _Normalise(torch.autograd.Function):
    """(x − m) / √(v + ε) · γ + β, where m and v are the statistics of all processes."""

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
        ctx.eps, ctx.has_bias = eps, bias is not None
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable  # a second derivative would silently leave out the other processes
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, count, mean, variance = ctx.saved_tensors
        # The backward pass for constant m and v: γ / √(v + ε) · g, and this process's Σ g x̂ and Σ g.
        options = weight, mean, variance, None, None, False, ctx.eps, (True, True, True)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(gradient.contiguous(), x, *options)
        sums = torch.stack([grad_weight, grad_bias])
        dist.all_reduce(sums)
        inverse_std = torch.rsqrt(variance + ctx.eps)
        factor = inverse_std if weight is None else inverse_std * weight
        # The remaining terms are linear in x.
        slope = -factor * inverse_std * sums[0] / count
        offset = -factor * sums[1] / count - slope * mean
        shape = [1, -1, *[1] * (x.ndim - 2)]
        grad_x = (grad_x + torch.addcmul(offset.view(shape), x, slope.view(shape))).to(x.dtype)
        grad_weight = grad_weight if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = grad_bias if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Copy the buffers of process 0 to all processes, in one message per type."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for buffer in filter(torch.numel, model.buffers()):
        by_type.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_type.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, 0)
        for buffer in buffers:
            buffer.copy_(flat[: buffer.numel()].view_as(buffer))
            flat = flat[buffer.numel() :]
