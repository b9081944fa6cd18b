"""Slow twins, to the letter of the papers: masked layers that sort in every forward pass, autograd through the mask.

The product must equal these; `benchmarks/step.py` measures how much faster it is.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SortedMask(torch.autograd.Function):
    """1 for the largest scores at a rate, else 0; straight through to the scores, summed to the rate."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, rate: Tensor) -> Tensor:
        ctx.rate_dtype = rate.dtype
        order = scores.flatten().sort(stable=True, descending=True).indices
        n = scores.numel()
        mask = torch.zeros(n, dtype=scores.dtype)
        mask[order[: n - int((1 - float(rate)) * n)]] = 1
        return mask.view(scores.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum().to(ctx.rate_dtype)


class Masked(nn.Module):
    """A convolution or linear layer whose weight is w * mask(|s|, g(r))."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, a_min: float, rate: float, learned_rate: bool) -> None:
        super().__init__()
        self.layer = layer
        self.a_min, self.learned_rate = a_min, learned_rate
        weight = layer.weight.detach()
        self.scores = nn.Parameter(math.sqrt(6 / weight[0].numel()) * weight / weight.abs().max())
        self.rate = rate
        quota = math.log((rate - a_min) / (1 - rate))
        self.quota = nn.Parameter(torch.tensor(quota, dtype=weight.dtype), requires_grad=learned_rate)

    def density(self) -> Tensor:
        if not self.learned_rate:
            return torch.tensor(self.rate, dtype=torch.float64)
        return (1 - self.a_min) * torch.sigmoid(self.quota.double()) + self.a_min

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight * SortedMask.apply(self.scores.abs(), self.density())
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return self.layer._conv_forward(x, weight, self.layer.bias)


class Twin:
    """A model rebuilt of masked layers, trained by plain autograd: HARP, or HYDRA if the rates are given."""

    def __init__(self, model: nn.Module, keep: float, rates: dict[str, float] | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.learned_rate = rates is None
        self.total = round(
            keep * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        )
        size = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        self.layers: dict[str, Masked] = {}
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Conv2d | nn.Linear):
                rate = 0.1 if rates is None else rates[name + ".weight"]
                masked = Masked(module, 0.1 * self.total / size, rate, self.learned_rate)
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(parent), child, masked)
                self.layers[name + ".weight"] = masked
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(True)
        for layer in self.layers.values():
            layer.scores.requires_grad_(True)
            layer.quota.requires_grad_(self.learned_rate)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def budget_loss(self) -> Tensor:
        spent = sum(layer.density() * layer.scores.numel() for layer in self.layers.values())
        return torch.clamp(spent / self.total - 1, min=0)
