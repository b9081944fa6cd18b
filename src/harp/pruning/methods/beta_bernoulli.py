"""Beta-Bernoulli dropout: masks of a layer's units whose probabilities are learned, with a prior that favours zeros.

Lee, Kim, Yoon, Lee, Yang, Hwang: "Adaptive Network Sparsification with Dependent Variational Beta-Bernoulli Dropout",
2018. A unit is an output channel of a convolution or an input of a linear layer. Each has a, b > 0 and, in training, a
mask z for every example:

    π = (1 − u^(1/b))^(1/a)   u ~ U(0, 1), one a unit           Kumaraswamy(a, b)
    z = σ((logit π + logit v) / τ)   v ~ U(0, 1), one an example      relaxed Bernoulli(π) of temperature τ
    E[π] = b Γ(1 + 1/a) Γ(b) / Γ(1 + 1/a + b)          the mask in eval mode; 0 if at most a threshold
    KL = (1 − α/a)(−γ − ψ(b) − 1/b) + log(ab/α) − (b − 1)/b         against Beta(α, 1), α = 10⁻⁴, γ Euler's constant

with a = softplus(max(−10, ·)), b = softplus(clip(·, −10, 50)), which start at 2 (convolution; linear: −1) and 0.5413.
Their masks that depend on the input are left out: ANP-VS, which uses these gates, has none.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harp.system.distributed.shared_noise import common, uniform

ALPHA = 1e-4
EULER = 0.577215664901532


class Gate(nn.Module):
    """The masks of one layer's units. Its methods are the hooks, so that a copy of a model has its own gates."""

    average: Tensor  # E[π] where it is above the threshold, else 0: what eval mode multiplies by
    first: Tensor  # Adam's running means of the gradient and of its square
    second: Tensor

    def __init__(self, weight: Tensor, temperature: float, threshold: float) -> None:
        super().__init__()
        self.dimensions = weight.ndim - 2  # that follow the channels; a linear layer has none
        self.temperature, self.threshold = temperature, threshold
        units, start = (weight.shape[0], 2.0) if self.dimensions else (weight.shape[1], -1.0)
        raw = torch.tensor([[start], [0.5413]], device=weight.device).repeat(1, units)
        self.raw = nn.Parameter(raw)  # a and b before the softplus
        self.register_buffer("average", torch.empty_like(raw[0]), persistent=False)
        self.register_buffer("first", torch.zeros_like(raw))
        self.register_buffer("second", torch.zeros_like(raw))
        self.record: list[Tensor] | None = None  # if set, drawn masks are added to it and applied detached
        self.replay: Iterator[Tensor] | None = None  # if set, the masks to use instead of new ones
        self.refresh()

    def expected(self) -> Tensor:
        """E[π]; in float64, as differences of lgamma lose digits, and so on the CPU."""
        return expected_pi(*_concentrations(self.raw.detach().cpu().double()))

    def divergence(self) -> Tensor:
        """The KL divergence of all units, differentiable."""
        return divergence(*_concentrations(self.raw.cpu().double())).sum()

    @torch.no_grad()
    def refresh(self) -> None:
        """Use the current parameters in eval mode."""
        expected = self.expected()
        self.average.copy_(torch.where(expected > self.threshold, expected, 0.0))

    def draw(self, examples: int | None) -> Tensor:
        """Masks of a batch, one row an example, or one row for all; differentiable."""
        a, b = _concentrations(self.raw)
        log_pi = sample_log_pi(a, b)
        draws = common(a[None]) if examples is None else uniform(a.new_empty(examples, len(a)))
        noise = _open(draws).logit()
        return ((log_pi - _log1mexp(log_pi) + noise) / self.temperature).sigmoid()

    def adam(self, gradient: Tensor, step: int) -> Tensor:
        """Adam's direction for the parameters, given their gradient; steps are counted from 1."""
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square(), 0.001)
        scale = (self.second / (1 - 0.999**step)).sqrt() + 1e-8
        return self.first / (1 - 0.9**step) / scale

    def register(self, module: nn.Module) -> RemovableHandle:
        """Multiply a module's outputs or inputs by the masks, until the handle is removed."""
        if self.dimensions:
            return module.register_forward_hook(self.after)
        return module.register_forward_pre_hook(self.before)

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """The hook behind a convolution."""
        return self._pass(output, module.training)

    def before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The hook in front of a linear layer."""
        return (self._pass(inputs[0], module.training), *inputs[1:])

    def _pass(self, x: Tensor, training: bool) -> Tensor:
        axis = x.ndim - 1 - self.dimensions
        if not training:
            return x * self.average.to(x.dtype).view(-1, *[1] * self.dimensions)
        z = self.draw(len(x) if axis else None) if self.replay is None else next(self.replay)
        if self.record is not None:
            self.record.append(z)
            z = z.detach()
        # One mask an example, the same at every position of a sequence or an image.
        shape = [len(z), *[1] * (axis - 1), -1] if axis else [-1]
        return x * z.to(x.dtype).view(*shape, *[1] * self.dimensions)


def expected_pi(a: Tensor, b: Tensor) -> Tensor:
    """The mean of Kumaraswamy's distribution."""
    return b * (torch.lgamma(1 + 1 / a) + torch.lgamma(b) - torch.lgamma(1 + 1 / a + b)).exp()


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """The KL divergence of Kumaraswamy(a, b) from Beta(α, 1)."""
    return (1 - ALPHA / a) * (-EULER - torch.digamma(b) - 1 / b) + (a * b / ALPHA).log() - (b - 1) / b


def sample_log_pi(a: Tensor, b: Tensor) -> Tensor:
    """The logarithm of a draw of π: at a small a the draw itself would be 0 and have no logit."""
    return _log1mexp(_open(common(a)).log() / b) / a


def _concentrations(raw: Tensor) -> tuple[Tensor, Tensor]:
    """a and b."""
    return F.softplus(raw[0].clamp_min(-10.0)), F.softplus(raw[1].clamp(-10.0, 50.0))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 − eˣ) for x ≤ 0, finite also at 0."""
    return (-torch.expm1(x.clamp_max(-1e-20))).log()


def _open(draws: Tensor) -> Tensor:
    """Draws from [0, 1) kept within the open interval."""
    least = torch.finfo(draws.dtype).eps
    return draws.clamp(least, 1 - least)
