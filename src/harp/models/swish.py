"""The Swish networks that most of the strongest public robust checkpoints are of, with the names of these checkpoints.

Gowal et al., "Uncovering the Limits of Adversarial Training against Norm-Bounded Adversarial Examples", 2020. They came
from TensorFlow: a convolution of stride 2 pads below and on the right only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.models.wide_resnet import blocks_of
from harp.models.width import scaled


def _conv(channels: int, out: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, stride, padding=1 if stride == 1 else 0, bias=False)


def _padded(x: Tensor, stride: int) -> Tensor:
    return x if stride == 1 else F.pad(x, (0, 1, 0, 1))


class WideBlock(nn.Module):
    """A block of the wide network: where the channels change, a 1x1 shortcut convolves the activated input."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.batchnorm_0 = nn.BatchNorm2d(channels)
        self.conv_0 = _conv(channels, out, stride)
        self.batchnorm_1 = nn.BatchNorm2d(out)
        self.conv_1 = _conv(out, out, 1)
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False) if channels != out or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """The block's output map."""
        activated = F.silu(self.batchnorm_0(x))
        y = self.conv_0(_padded(activated, self.stride))
        y = self.conv_1(F.silu(self.batchnorm_1(y)))
        result: Tensor = y + (x if self.shortcut is None else self.shortcut(activated))
        return result


class WideGroup(nn.Module):
    """Blocks of one width; the first may halve the image."""

    def __init__(self, count: int, channels: int, out: int, stride: int) -> None:
        super().__init__()
        rest = (WideBlock(out, out, 1) for _ in range(count - 1))
        self.block = nn.Sequential(WideBlock(channels, out, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        """The group's output map."""
        y: Tensor = self.block(x)
        return y


class SwishWideResNet(nn.Module):
    """Three groups of blocks, with `widen` times the channels of the thin network."""

    def __init__(self, depth: int, widen: float, width: float, num_classes: int, in_channels: int) -> None:
        super().__init__()
        count = blocks_of(depth)
        channels = [scaled(16, width), *(scaled(thin, widen * width) for thin in (16, 32, 64))]
        self.init_conv = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        pairs = zip(channels, channels[1:], (1, 2, 2), strict=False)
        self.layer = nn.Sequential(*(WideGroup(count, before, out, stride) for before, out, stride in pairs))
        self.batchnorm = nn.BatchNorm2d(channels[-1])
        self.logits = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = F.silu(self.batchnorm(self.layer(self.init_conv(x))))
        logits: Tensor = self.logits(x.mean(dim=(2, 3)))
        return logits


class SwishBlock(nn.Module):
    """A block of the ResNet-18: where the shape changes, a 3x3 shortcut convolves the raw input."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.batchnorm_0 = nn.BatchNorm2d(channels)
        self.conv_2d_1 = _conv(channels, out, stride)
        self.batchnorm_1 = nn.BatchNorm2d(out)
        self.conv_2d_2 = _conv(out, out, 1)
        self.shortcut = _conv(channels, out, stride) if channels != out or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """The block's output map."""
        y = self.conv_2d_1(_padded(F.silu(self.batchnorm_0(x)), self.stride))
        y = self.conv_2d_2(F.silu(self.batchnorm_1(y)))
        result: Tensor = y + (x if self.shortcut is None else self.shortcut(_padded(x, self.stride)))
        return result


class SwishPreActResNet18(nn.Module):
    """Four stages of two blocks each, then batch norm, Swish and a linear layer."""

    def __init__(self, width: float, num_classes: int, in_channels: int) -> None:
        super().__init__()
        channels = [scaled(thin, width) for thin in (64, 64, 128, 256, 512)]
        self.conv_2d = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.layer_0, self.layer_1, self.layer_2, self.layer_3 = (
            nn.Sequential(SwishBlock(before, out, stride), SwishBlock(out, out, 1))
            for before, out, stride in zip(channels, channels[1:], (1, 2, 2, 2), strict=False)
        )
        self.batchnorm = nn.BatchNorm2d(channels[-1])
        self.logits = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = self.layer_3(self.layer_2(self.layer_1(self.layer_0(self.conv_2d(x)))))
        x = F.silu(self.batchnorm(x))
        logits: Tensor = self.logits(torch.mean(x, dim=(2, 3)))
        return logits


def swish_wrn(
    num_classes: int = 10, in_channels: int = 3, depth: int = 28, widen: float = 10, width: float = 1.0
) -> SwishWideResNet:
    """A wide network with Swish: WRN-`depth`-`widen`."""
    return SwishWideResNet(depth, widen, width, num_classes, in_channels)


def swish_preact_resnet18(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> SwishPreActResNet18:
    """A pre-activation ResNet-18 with Swish: stages of 64, 128, 256 and 512 channels, two blocks each."""
    return SwishPreActResNet18(width, num_classes, in_channels)
