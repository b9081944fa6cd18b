"""A small network with batch norms that computes in float64, for recipes whose runs are compared to the last digit."""

import torch
from torch import Tensor, nn


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def network(num_classes: int = 10) -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(Double(), *layers, nn.Linear(256, num_classes)).double()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):  # at zero, rounding decides on which side of a ReLU a dead channel is
            torch.nn.init.uniform_(module.bias, -0.5, 0.5)
    return model
