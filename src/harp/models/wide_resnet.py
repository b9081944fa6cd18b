"""Wide residual networks: normalise, rectify, then convolve.

The modules are named as in the public robust checkpoints, which therefore load.
"""

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.models.width import scaled


class PreactivationBlock(nn.Module):
    """Batch norm and ReLU before each of two 3x3 convolutions.

    Where the shape changes, the shortcut convolves the activated input; elsewhere it is the raw input.
    """

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.convShortcut: nn.Conv2d | None = None
        if stride != 1 or channels != out:
            self.convShortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output map."""
        activated = torch.relu(self.bn1(x))
        y: Tensor = self.conv2(torch.relu(self.bn2(self.conv1(activated))))
        return y + (x if self.convShortcut is None else self.convShortcut(activated))


class Stage(nn.Module):
    """Blocks of one width; the first may halve the image."""

    def __init__(self, count: int, channels: int, out: int, stride: int) -> None:
        super().__init__()
        first = PreactivationBlock(channels, out, stride)
        self.layer = nn.Sequential(first, *(PreactivationBlock(out, out, 1) for _ in range(count - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """The stage's output map."""
        y: Tensor = self.layer(x)
        return y


class WideResNet(nn.Module):
    """Three stages of `blocks` blocks, with `widen` times the channels of the thin network."""

    def __init__(self, blocks: int, widen: float, num_classes: int, in_channels: int, width: float) -> None:
        super().__init__()
        stem = scaled(16, width)
        first, second, third = (scaled(channels, widen * width) for channels in (16, 32, 64))
        self.conv1 = nn.Conv2d(in_channels, stem, 3, padding=1, bias=False)
        self.block1 = Stage(blocks, stem, first, stride=1)
        self.block2 = Stage(blocks, first, second, stride=2)
        self.block3 = Stage(blocks, second, third, stride=2)
        self.bn1 = nn.BatchNorm2d(third)
        self.fc = nn.Linear(third, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        logits: Tensor = self.fc(torch.relu(self.bn1(x)).mean(dim=(2, 3)))
        return logits


def wrn_28_4(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> WideResNet:
    """WideResNet-28-4: 28 layers, four times the thin network's channels."""
    return WideResNet(4, 4, num_classes, in_channels, width)


def wrn_28_10(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> WideResNet:
    """WideResNet-28-10: 28 layers, ten times the thin network's channels."""
    return WideResNet(4, 10, num_classes, in_channels, width)


def wrn(
    num_classes: int = 10, in_channels: int = 3, depth: int = 34, widen: float = 10, width: float = 1.0
) -> WideResNet:
    """WideResNet-`depth`-`widen`."""
    return WideResNet(blocks_of(depth), widen, num_classes, in_channels, width)


def blocks_of(depth: int) -> int:
    """The blocks in each of the three stages of a wide network of so many layers."""
    if type(depth) is not int or depth < 10 or (depth - 4) % 6:
        raise ModelError(f"depth is {depth!r}; it must be a whole number 6 n + 4, such as 28, 34 or 70")
    return (depth - 4) // 6
