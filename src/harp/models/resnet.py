"""Residual networks: the form for small images (3x3 stem) and the form for ImageNet (7x7 stem, bottlenecks).

Modules are declared in the order convolutions, then shortcut: per-layer tables of this field list them so.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harp.models.width import scaled


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output map."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The form for small images: a 3x3 stem, then stages of `channels`; all but the first halve the map."""

    def __init__(self, channels: Sequence[int], blocks: Sequence[int], num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self._stages = [f"layer{stage}" for stage in range(1, len(channels) + 1)]
        before = channels[0]
        for stage, (out, count) in enumerate(zip(channels, blocks, strict=True)):
            first = BasicBlock(before, out, stride=2 if stage else 1)
            rest = [BasicBlock(out, out, stride=1) for _ in range(count - 1)]
            self.add_module(self._stages[stage], nn.Sequential(first, *rest))
            before = out
        self.linear = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = torch.relu(self.bn1(self.conv1(x)))
        for stage in self._stages:
            x = self.get_submodule(stage)(x)
        # Over the whole map: the published 4x4 window at 32x32, and every other size works too.
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with four times the channels at the end, and a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential()
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output map."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ImageNetResNet(nn.Module):
    """The form for large images: 7x7 stem, max pooling, four stages of bottlenecks."""

    def __init__(self, inner: int, blocks: Sequence[int], num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, inner, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _bottlenecks(inner, inner, blocks[0], stride=1)
        self.layer2 = _bottlenecks(4 * inner, 2 * inner, blocks[1], stride=2)
        self.layer3 = _bottlenecks(8 * inner, 4 * inner, blocks[2], stride=2)
        self.layer4 = _bottlenecks(16 * inner, 8 * inner, blocks[3], stride=2)
        self.fc = nn.Linear(32 * inner, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _bottlenecks(channels: int, inner: int, count: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, inner, stride)
    return nn.Sequential(first, *(Bottleneck(4 * inner, inner, 1) for _ in range(count - 1)))


def resnet18(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> ResNet:
    """ResNet-18 for small images: stages of 64, 128, 256 and 512 channels, two blocks each."""
    channels = [scaled(channels, width) for channels in (64, 128, 256, 512)]
    return ResNet(channels, (2, 2, 2, 2), num_classes, in_channels)


def resnet50(num_classes: int = 1000, in_channels: int = 3, width: float = 1.0) -> ImageNetResNet:
    """ResNet-50 for ImageNet: 3, 4, 6 and 3 bottlenecks."""
    return ImageNetResNet(scaled(64, width), (3, 4, 6, 3), num_classes, in_channels)
