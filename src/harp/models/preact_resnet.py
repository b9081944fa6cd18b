"""The pre-activation ResNet-18 for small images, with the names of the public robust checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harp.models.width import scaled


class PreActBlock(nn.Module):
    """Batch norm and ReLU before each of two 3x3 convolutions.

    Where the shape changes, the shortcut convolves the raw input or the activated one: published networks differ.
    """

    def __init__(self, channels: int, out: int, stride: int, activated: bool) -> None:
        super().__init__()
        self.activated = activated
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output map."""
        activated = torch.relu(self.bn1(x))
        y: Tensor = self.conv2(torch.relu(self.bn2(self.conv1(activated))))
        return y + (x if self.shortcut is None else self.shortcut(activated if self.activated else x))


class PreActResNet(nn.Module):
    """A 3x3 stem, four stages of two blocks each, and a linear layer; `final_norm`: batch norm and ReLU before it."""

    def __init__(
        self, channels: Sequence[int], num_classes: int, in_channels: int, final_norm: bool, activated: bool
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        befores = (channels[0], *channels[:-1])
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(PreActBlock(before, out, stride, activated), PreActBlock(out, out, 1, activated))
            for before, out, stride in zip(befores, channels, (1, 2, 2, 2), strict=True)
        )
        self.bn = nn.BatchNorm2d(channels[-1]) if final_norm else None
        self.linear = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        if self.bn is not None:
            x = torch.relu(self.bn(x))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


def preact_resnet18(
    num_classes: int = 10, in_channels: int = 3, width: float = 1.0, final_norm: bool = True, activated: bool = True
) -> PreActResNet:
    """Pre-activation ResNet-18: stages of 64, 128, 256 and 512 channels, two blocks each."""
    channels = [scaled(channels, width) for channels in (64, 128, 256, 512)]
    return PreActResNet(channels, num_classes, in_channels, final_norm, activated)
