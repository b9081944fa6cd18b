"""Channels of the known architectures: the smaller network is the masked one, and costs what was predicted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harp import models
from harp.errors import MissingExtra
from harp.models import external
from harp.pruning.channels import Channels
from support.slimmed import check

try:
    torchvision = external.import_torchvision()
    import timm
except (MissingExtra, ImportError):
    pytest.skip("torchvision and timm are not installed", allow_module_level=True)


def ours(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: models.build(name, num_classes=10, shape=(3, 32, 32), **options)


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=10, **options)


def from_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=10, **options)


class Step(nn.Sequential):
    """Two convolutions of a U-Net."""

    def __init__(self, channels: int, out: int) -> None:
        parts = [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        super().__init__(*parts, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, across by concatenation."""

    def __init__(self, widths: tuple[int, ...] = (6, 8, 12)) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList([Step(channels, out) for channels, out in pairs])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs[1:])])
        self.merge = nn.ModuleList([Step(2 * a, a) for a, _ in reversed(pairs[1:])])
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, step in enumerate(self.down):
            x = step(nn.functional.max_pool2d(x, 2) if number else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([up(x), skip], dim=1))
        return self.head(x)


class EncoderViT(nn.Module):
    """A vision transformer of `torch.nn.TransformerEncoder`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 8, stride=8)
        self.token = nn.Parameter(torch.zeros(1, 1, 24))
        self.position = nn.Parameter(torch.randn(1, 17, 24) * 0.02)
        layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


def small_mobilenet() -> nn.Module:
    settings = [[1, 8, 1, 1], [4, 12, 2, 2], [4, 16, 2, 1]]
    return torchvision.models.MobileNetV2(10, inverted_residual_setting=settings)


def small_mobilenet3() -> nn.Module:
    part = torchvision.models.mobilenetv3.InvertedResidualConfig
    rows = [
        (16, 3, 16, 16, True, "RE", 2, 1, 1),
        (16, 3, 32, 24, False, "HS", 2, 1, 1),
        (24, 5, 48, 24, True, "HS", 1, 1, 1),
    ]
    return torchvision.models.MobileNetV3([part(*row) for row in rows], 48, num_classes=10)


def small_efficientnet() -> nn.Module:
    part = torchvision.models.efficientnet.MBConvConfig
    rows = [(1, 3, 1, 16, 16, 1), (4, 3, 2, 16, 24, 2), (4, 5, 2, 24, 24, 1)]
    settings = [part(*row, width_mult=1.0, depth_mult=1.0) for row in rows]
    return torchvision.models.EfficientNet(settings, 0.1, num_classes=10)


def small_efficientnet2() -> nn.Module:
    part = torchvision.models.efficientnet
    settings = [part.FusedMBConvConfig(1, 3, 1, 16, 16, 1), part.FusedMBConvConfig(4, 3, 2, 16, 24, 2)]
    return torchvision.models.EfficientNet(settings, 0.1, num_classes=10, last_channel=40)


def small_convnext() -> nn.Module:
    part = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([part(12, 24, 1), part(24, None, 2)], num_classes=10)


def small_regnet(se: float | None) -> Callable[[], nn.Module]:
    part = torchvision.models.regnet.BlockParams
    blocks = part([2, 2, 1], [16, 24, 32], [8, 8, 8], [1.0, 1.0, 1.0], [2, 2, 2], se)
    return lambda: torchvision.models.RegNet(blocks, num_classes=10, stem_width=12)


def small_swin(block: str) -> Callable[[], nn.Module]:
    part = torchvision.models.swin_transformer
    kind = {
        "v1": (part.SwinTransformerBlock, part.PatchMerging),
        "v2": (part.SwinTransformerBlockV2, part.PatchMergingV2),
    }
    options = dict(zip(("block", "downsample_layer"), kind[block], strict=True))
    return lambda: part.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10, **options)


def small_inception() -> nn.Module:
    """The kinds of blocks of Inception v3 that differ, at a small resolution."""
    part = torchvision.models.inception
    stem = nn.Sequential(
        part.BasicConv2d(3, 16, kernel_size=3, stride=2), part.BasicConv2d(16, 24, kernel_size=3, padding=1)
    )
    blocks = nn.Sequential(part.InceptionA(24, 8), part.InceptionB(232), part.InceptionC(712, 12))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(768, 10))
    return nn.Sequential(stem, blocks, head)


def small_densenet() -> nn.Module:
    return torchvision.models.DenseNet(8, (3, 4), 16, num_classes=10)


def small_shufflenet() -> nn.Module:
    return torchvision.models.ShuffleNetV2([2, 3, 2], [8, 16, 24, 32, 48], num_classes=10)


# The model, the images' size, and how many spaces must be found at least.
SMALL: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "vgg16": (ours("vgg16", width=0.125), 32, 15),
    "resnet18": (ours("resnet18", width=0.125), 32, 12),
    "resnet50": (ours("resnet50", width=0.125), 32, 37),
    "wrn-28-4": (ours("wrn-28-4", width=0.125), 32, 16),
    "densenet": (small_densenet, 64, 15),
    "mobilenet-v2": (small_mobilenet, 64, 7),
    "mobilenet-v3": (small_mobilenet3, 64, 7),
    "efficientnet": (small_efficientnet, 64, 11),
    "efficientnet-v2": (small_efficientnet2, 64, 5),
    "convnext": (small_convnext, 64, 3),
    "regnet-x": (small_regnet(None), 64, 8),
    "regnet-y": (small_regnet(0.25), 64, 13),
    "shufflenet": (small_shufflenet, 64, 6),
    "inception": (small_inception, 64, 18),
    "squeezenet": (vision("squeezenet1_1"), 64, 25),
    "u-net": (UNet, 32, 11),
    "encoder-vit": (EncoderViT, 32, 4),
    "torchvision-vit": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=10), 32, 4,
    ),
    "torchvision-swin": (small_swin("v1"), 64, 4),
    "torchvision-swin-v2": (small_swin("v2"), 64, 4),
    "timm-vit": (from_timm("vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=2), 64, 4),
    "timm-swin": (
        from_timm("swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(2, 1), num_heads=(2, 4)), 56, 6,
    ),
    "timm-resnet26d": (from_timm("resnet26d", base_width=8), 64, 18),
}  # fmt: skip

FULL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{name: (ours(name), 32) for name in ("vgg16", "resnet18", "resnet50", "wrn-28-4")},
    **{
        name: (vision(name), 224)
        for name in (
            "resnet18", "vgg11_bn", "densenet121", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large",
            "efficientnet_b0", "efficientnet_v2_s", "convnext_tiny", "regnet_x_400mf", "regnet_y_400mf",
            "shufflenet_v2_x1_0", "squeezenet1_1", "vit_b_16", "swin_t", "swin_v2_t", "mnasnet1_0", "resnext50_32x4d",
        )
    },
    "googlenet": (vision("googlenet", init_weights=False), 224),
    "inception_v3": (vision("inception_v3", init_weights=False), 299),
    **{name: (from_timm(name), 224) for name in ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet26d")},
    "u-net": (lambda: UNet((64, 128, 256, 512)), 64),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_a_cut_network_answers_like_the_masked_one_and_costs_what_was_predicted(name: str) -> None:
    make, size, least = SMALL[name]
    checked = check(make(), torch.rand(2, 3, size, size), densities=(0.3,))
    assert len(checked.units.spaces) >= least
    places = [part.reason for part in checked.units.whole if part.reason != "the model's input"]
    assert all(" at " in reason or ".py:" in reason for reason in places)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_full_size(name: str) -> None:
    make, size = FULL[name]
    check(make(), torch.rand(2, 3, size, size), densities=(0.5, 0.1))


def test_auxiliary_heads_still_fit_in_training() -> None:
    model = torchvision.models.GoogLeNet(num_classes=10, init_weights=False, aux_logits=True)
    units = Channels(model, torch.rand(1, 3, 96, 96))
    masks = units.expand([torch.arange(size) < max(1, size // 2) for size in units.sizes])
    assert any(name.startswith("aux1") for name in masks)
    small = units.cut(masks).applied(model).train()
    answer = small(torch.rand(2, 3, 96, 96))
    assert answer.aux_logits1.shape == answer.aux_logits2.shape == answer.logits.shape == (2, 10)
