"""VGG with batch normalisation, in the form that robust-pruning papers use on 32x32 images."""

from collections.abc import Sequence

from torch import Tensor, nn

from harp.models.width import scaled

POOL = 0  # in a plan of channel counts: halve the image here
VGG16 = (64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512)


class VGG(nn.Module):
    """3x3 convolutions by `plan`, then three linear layers on a 2x2 average.

    The averaging changes nothing for the 2x2 maps of a 32x32 image; it lets other image sizes in.
    """

    def __init__(self, plan: Sequence[int], hidden: int, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for out in plan:
            if out == POOL:
                layers.append(nn.MaxPool2d(2))
                continue
            conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
            channels = out
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(4 * channels, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits


def vgg16(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> VGG:
    """The paper's VGG16: 13 convolutions, four poolings, linear layers 2048-256-256-classes."""
    plan = [scaled(channels, width) if channels else POOL for channels in VGG16]
    return VGG(plan, scaled(256, width), num_classes, in_channels)
