"""Networks of `stability.py` that the package does not have: a quick residual one, and one without batch norm."""

from torch import nn

from harp.models.small import resnet8


def residual(num_classes: int, in_channels: int) -> nn.Sequential:
    """ResNet8 on squares of 4x4 pixels as channels, which is a sixteenth of the work; 122,880 weights."""
    return nn.Sequential(nn.PixelUnshuffle(4), resnet8(num_classes, in_channels * 16, width=1.25))


def unnormalised(num_classes: int, shape: tuple[int, int, int]) -> nn.Sequential:
    """Two convolutions of stride 2 and two linear layers, with biases and no batch norm; 105,744 weights."""
    channels, height, breadth = shape
    inputs = 32 * -(-height // 4) * -(-breadth // 4)
    layers = [
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(inputs, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    ]
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):  # without norms the initial scale matters (He et al. 2015)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
