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


class ConvNet(nn.Module):
    """`depth` 3x3 convolutions with batch norm, a pooling after every second one, and two linear layers.

    `width` is the channel count of the first convolution; the others have twice and the hidden linear layer
    has four times as many. The first linear layer is sized for images of `shape`.
    """

    def __init__(self, num_classes: int, shape: tuple[int, int, int], width: int, depth: int) -> None:
        super().__init__()
        for name, value in (("width", width), ("depth", depth)):
            if type(value) is not int or value < 1:
                raise ModelError(f"convnet's {name} is {value!r}; it must be a whole number from 1 up")
        channels, height, breadth = shape
        side = 2 ** (depth // 2)
        if min(height, breadth) < side:
            raise ModelError(f"convnet of depth {depth} needs images of at least {side}x{side}, got {height}x{breadth}")
        layers: list[nn.Module] = []
        for index in range(depth):
            out = 2 * width if index else width
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            if index % 2:
                layers.append(nn.MaxPool2d(2))
            channels = out
        self.features = nn.Sequential(*layers)
        hidden = nn.Linear(channels * (height // side) * (breadth // side), 4 * width)
        self.classifier = nn.Sequential(hidden, nn.ReLU(), nn.Linear(4 * width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def convnet(
    num_classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28), width: int = 32, depth: int = 4
) -> ConvNet:
    """The plain network for small grey images: conv32-conv64-pool-conv64-conv64-pool-fc128-fc."""
    return ConvNet(num_classes, shape, width, depth)


class TinyNet(nn.Module):
    """Four 3x3 convolutions with batch norm, three of them with stride 2, and two linear layers.

    Halving the image at once leaves a tenth of the work of a network that pools later, which is what lets a
    laptop train it against an attack in seconds an epoch.
    """

    def __init__(self, num_classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        if type(width) is not int or width < 1:
            raise ModelError(f"tinynet's width is {width!r}; it must be a whole number from 1 up")
        channels, height, breadth = shape
        layers: list[nn.Module] = []
        for out, stride in ((width, 2), (2 * width, 2), (4 * width, 1), (4 * width, 2)):
            layers += [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels, height, breadth = out, -(-height // stride), -(-breadth // stride)
        self.features = nn.Sequential(*layers)
        hidden = nn.Linear(channels * height * breadth, 8 * width)
        self.classifier = nn.Sequential(hidden, nn.ReLU(), nn.Linear(8 * width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def tinynet(num_classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28), width: int = 16) -> TinyNet:
    """The quickest network to train robustly on a CPU: conv16/2-conv32/2-conv64-conv64/2-fc128-fc."""
    return TinyNet(num_classes, shape, width)
