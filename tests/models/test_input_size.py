"""The size of images that a model is made for."""

from pathlib import Path

import pytest
import torch

from harp.errors import MissingExtra
from harp.models import expected_size, external

FIXED = "nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(4 * 144, {classes}))"
MODELS = {
    "fixed": (f"def make(num_classes):\n    return {FIXED.format(classes='num_classes')}", 48),
    "any": ("def make():\n    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())", None),
    "built for any": (
        "def make(shape):\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * shape[1] ** 2, 2))",
        None,
    ),
    "says it": (
        "def make():\n    net = nn.Flatten()\n    net.default_cfg = {'input_size': (3, 50, 50)}\n    return net",
        50,
    ),
    "fails": ("def make():\n    raise OSError('no')", None),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_network_of_a_user(name: str, tmp_path: Path) -> None:
    text, expected = MODELS[name]
    (tmp_path / "net.py").write_text(f"from torch import nn\n{text}\n")
    state = torch.get_rng_state()
    assert expected_size(f"{tmp_path / 'net.py'}:make", 3, {}) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def vision() -> None:
    try:
        external.import_torchvision()
        import timm  # noqa: F401
    except MissingExtra:
        pytest.skip("torchvision and timm are not installed")


@pytest.mark.parametrize(("spec", "size"), [("resnet18", 32), ("resnet50", 224)])
def test_models_of_the_table(spec: str, size: int) -> None:
    assert expected_size(spec, 10, {}) == size


@pytest.mark.parametrize(("spec", "size"), [("torchvision:inception_v3", 299), ("timm:vit_tiny_patch16_384", 384)])
def test_models_of_libraries(spec: str, size: int, vision: None) -> None:
    assert expected_size(spec, 10, {}) == size


def test_an_option_sets_the_size_of_a_timm_model(vision: None) -> None:
    assert expected_size("timm:vit_tiny_patch16_224", 10, {"img_size": 64}) == 64


def test_unknown_models_have_no_size(vision: None) -> None:
    assert expected_size("torchvision:nothing", 10, {}) is expected_size("timm:nothing", 10, {}) is None
