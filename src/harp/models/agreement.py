"""Whether a faster function of images has the same logits and gradients as a model."""

from collections.abc import Callable

import torch
from torch import Tensor

_Network = Callable[[Tensor], Tensor]

# The allowed difference of logits, relative to the largest one. In lower precisions rounding could change a class.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}
# The allowed difference of the gradient of an image, relative to its norm: a ReLU near 0 may be on either side.
_GRADIENT_TOLERANCE = 2e-2


def disagreement(function: _Network, model: _Network, example: Tensor) -> str:
    """How a function differs from a model near a batch of images; empty if it does not."""
    x = _distinct_pixels(example.detach())
    with torch.autocast(example.device.type, enabled=False):
        expected, expected_gradient = _with_gradient(model, x)
        logits, gradient = _with_gradient(function, x)
    difference = float((logits - expected).abs().max())
    if not difference <= TOLERANCE[example.dtype] * float(expected.abs().max()):
        return f"its logits are off by {difference:.1e}"
    gap = (gradient - expected_gradient).flatten(1).norm(dim=1)
    norm = expected_gradient.flatten(1).norm(dim=1)
    error = float(torch.where(gap == 0, 0, gap / norm).median())  # a few images may be at a kink
    return "" if error <= _GRADIENT_TOLERANCE else f"its gradients are off by {error:.1%}"


def _distinct_pixels(example: Tensor) -> Tensor:
    """Images near those of a batch, within their range, without equal pixels.

    Among equal pixels, rounding decides which one is the maximum of a window and gets the gradient.
    """
    low, high = map(float, example.aminmax())
    high = high if high > low else low + 1
    random = torch.rand(example.shape, generator=torch.Generator().manual_seed(0), dtype=example.dtype)
    return torch.lerp(example, (low + (high - low) * random).to(example.device), 0.1)


def _with_gradient(net: _Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of a sum of them with fixed weights; zeros where there is none."""
    points = x.clone().requires_grad_(True)
    with torch.enable_grad():
        logits = net(points.clone())  # a model may overwrite its images
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    if not logits.requires_grad:
        return logits, torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(logits, points, weights, allow_unused=True)
    return logits.detach(), torch.zeros_like(x) if gradient is None else gradient
