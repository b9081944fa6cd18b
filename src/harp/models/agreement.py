"""Whether a faster function of images has the logits of a model, and its gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

_Network = Callable[[Tensor], Tensor]

# What logits may differ by, relative to the largest one. In lower precisions one more rounding could move a decision.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}
# What the gradient of an image may differ by, relative to its length: a ReLU at its kink may fall to either side.
_GRADIENT_TOLERANCE = 2e-2


def disagreement(found: _Network, model: _Network, example: Tensor) -> str:
    """How a function differs from a model near a batch of images; nothing if it does not."""
    x = _apart(example.detach())
    with torch.autocast(example.device.type, enabled=False):
        expected, slope = _with_gradient(model, x)
        logits, other = _with_gradient(found, x)
    difference = float((logits - expected).abs().max())
    if not difference <= TOLERANCE[example.dtype] * float(expected.abs().max()):
        return f"its logits are off by {difference:.1e}"
    gap, length = (each.flatten(1).norm(dim=1) for each in (other - slope, slope))
    error = float(torch.where(gap == 0, 0, gap / length).median())  # some images may have a kink near them
    return "" if error <= _GRADIENT_TOLERANCE else f"its gradients are off by {error:.1%}"


def _apart(example: Tensor) -> Tensor:
    """Images near those of a batch, within their range, of which no two pixels are the same.

    On even ground rounding says which pixel of a window is the largest, and the gradient goes there.
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
