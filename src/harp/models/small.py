"""Networks small enough to train robustly on a CPU."""

from torch import Tensor, nn

from harp.errors import ModelError
from harp.models.resnet import ResNet
from harp.models.vgg import POOL, VGG
from harp.models.width import scaled

VGG8 = (32, POOL, 64, POOL, 128, 128, POOL, 256)


def vgg8(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> VGG:
    """A VGG of five convolutions and three linear layers."""
    plan = [scaled(channels, width) if channels else POOL for channels in VGG8]
    return VGG(plan, scaled(128, width), num_classes, in_channels)


def resnet8(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> ResNet:
    """A ResNet of three stages with one block each, of 16, 32 and 64 channels."""
    return ResNet([scaled(channels, width) for channels in (16, 32, 64)], (1, 1, 1), num_classes, in_channels)


class SmallNet(nn.Module):
    """Convolutional layers and two linear ones."""

    def __init__(self, layers: list[nn.Module], inputs: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class ConvNet(SmallNet):
    """`depth` 3x3 convolutions with batch norm, a pooling after every second one, and two linear layers.

    `width` is the channel count of the first convolution; the others have twice and the hidden linear layer
    has four times as many, rounded. The first linear layer is sized for images of `shape`.
    """

    def __init__(self, num_classes: int, shape: tuple[int, int, int], width: int | float, depth: int) -> None:
        first, others, hidden = (scaled(factor, width) for factor in (1, 2, 4))
        if type(depth) is not int or depth < 1:
            raise ModelError(f"convnet's depth is {depth!r}; it must be a whole number from 1 up")
        channels, height, breadth = shape
        side = 2 ** (depth // 2)
        if min(height, breadth) < side:
            raise ModelError(f"convnet of depth {depth} needs images of at least {side}x{side}, got {height}x{breadth}")
        layers: list[nn.Module] = []
        for index in range(depth):
            out = others if index else first
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            if index % 2:
                layers.append(nn.MaxPool2d(2))
            channels = out
        super().__init__(layers, channels * (height // side) * (breadth // side), hidden, num_classes)


def convnet(
    num_classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28), width: int | float = 32, depth: int = 4
) -> ConvNet:
    """The plain network for small grey images: conv32-conv64-pool-conv64-conv64-pool-fc128-fc."""
    return ConvNet(num_classes, shape, width, depth)


class TinyNet(SmallNet):
    """Four 3x3 convolutions with batch norm, three of them with stride 2, and two linear layers.

    The image is halved at once, which leaves a tenth of the work of a network that pools later: a laptop trains it
    against an attack in seconds an epoch.
    """

    def __init__(self, num_classes: int, shape: tuple[int, int, int], width: int | float) -> None:
        first, second, third, hidden = (scaled(factor, width) for factor in (1, 2, 4, 8))
        channels, height, breadth = shape
        layers: list[nn.Module] = []
        for out, stride in ((first, 2), (second, 2), (third, 1), (third, 2)):
            layers += [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels, height, breadth = out, -(-height // stride), -(-breadth // stride)
        super().__init__(layers, channels * height * breadth, hidden, num_classes)


def tinynet(num_classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28), width: int | float = 16) -> TinyNet:
    """The quickest network to train robustly on a CPU: conv16/2-conv32/2-conv64-conv64/2-fc128-fc."""
    return TinyNet(num_classes, shape, width)
