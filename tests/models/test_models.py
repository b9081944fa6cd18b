import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harp.errors import MissingExtra, ModelError
from harp.models import MODELS, Normalized, build, external


def refused(spec: str, **arguments) -> str:
    """The message of the ModelError that `build` must raise, which must be one line."""
    with pytest.raises(ModelError) as caught:
        build(spec, **{"num_classes": 10, "shape": (3, 32, 32), **arguments})
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def layers(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}


def weights(model: nn.Module) -> int:
    return sum(layer.weight.numel() for layer in layers(model).values())


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(scope="module")
def vision() -> None:
    try:
        external.import_torchvision()
        import timm  # noqa: F401
    except ImportError:
        pytest.skip("torchvision and timm are not installed")


# ---------------------------------------------------------------- the published shapes


def test_vgg16_is_that_of_the_paper():
    model = MODELS["vgg16"].factory(num_classes=10)
    assert (weights(model), parameters(model), len(layers(model))) == (15_302_848, 15_311_818, 16)
    convs = [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]
    names = [f"features.{n}" for n in convs] + [f"classifier.{n}" for n in (0, 2, 4)]
    assert list(layers(model)) == names
    assert all(layer.bias is None for name, layer in layers(model).items() if name.startswith("features"))
    assert [tuple(model.classifier[n].weight.shape) for n in (0, 2, 4)] == [(256, 2048), (256, 256), (10, 256)]


def test_vgg16_is_initialised_as_in_the_paper():
    model = MODELS["vgg16"].factory(num_classes=10)
    for layer in layers(model).values():
        if isinstance(layer, nn.Linear):
            assert abs(float(layer.weight.detach().std()) / 0.01 - 1) < 0.1
            assert not layer.bias.any()
        else:
            fan_out = layer.out_channels * 9
            assert abs(float(layer.weight.detach().std()) / (2 / fan_out) ** 0.5 - 1) < 0.1


def test_resnet18_is_that_of_the_paper():
    model = MODELS["resnet18"].factory(num_classes=10)
    assert (weights(model), parameters(model), len(layers(model))) == (11_164_352, 11_173_962, 21)
    names = ["conv1"]
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            names += [f"layer{stage}.{block}.conv1", f"layer{stage}.{block}.conv2"]
            names += [f"layer{stage}.{block}.shortcut.0"] if stage > 1 and block == 0 else []
    assert list(layers(model)) == [*names, "linear"]
    state = model.state_dict()
    for name in ("bn1.weight", "layer2.0.bn2.running_var", "layer2.0.shortcut.1.bias", "linear.bias"):
        assert name in state
    assert not any(name.startswith("layer1.0.shortcut") for name in state)


def test_resnet50_is_that_of_the_paper():
    model = MODELS["resnet50"].factory()
    assert (weights(model), parameters(model), len(layers(model))) == (25_502_912, 25_557_032, 54)
    first = ["conv1", *(f"layer1.0.{name}" for name in ("conv1", "conv2", "conv3", "downsample.0"))]
    assert list(layers(model))[:5] == first
    assert list(layers(model))[-1] == "fc"


def test_resnet50_loads_the_weights_of_torchvision(vision):
    theirs = build("torchvision:resnet50", num_classes=7, shape=(3, 64, 64))
    ours = build("resnet50", num_classes=7, shape=(3, 64, 64))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.rand(1, 3, 64, 64)
    assert torch.allclose(ours.eval()(images), theirs.eval()(images), atol=1e-5)


@pytest.mark.parametrize(("name", "count"), [("wrn-28-4", 5_849_050), ("wrn-28-10", 36_479_194)])
def test_wide_resnets_are_the_published_ones(name, count):
    with torch.device("meta"):
        model = MODELS[name].factory(num_classes=10)
    assert parameters(model) == count
    assert len(layers(model)) == 29  # stem, 24 in the blocks, three shortcuts, linear
    assert list(layers(model))[:4] == [
        "conv1",
        "block1.layer.0.conv1",
        "block1.layer.0.conv2",
        "block1.layer.0.convShortcut",
    ]


def test_wide_resnet_normalises_before_it_convolves():
    model = build("wrn-28-4", num_classes=10, shape=(3, 32, 32), width=0.25)
    order: list[str] = []
    for name, module in model.block2.layer[1].named_children():
        module.register_forward_hook(lambda *_, name=name: order.append(name))
    model(torch.rand(2, 3, 32, 32))
    assert order == ["bn1", "conv1", "bn2", "conv2"]


# ---------------------------------------------------------------- every model of the table

SMALL = {name: {"width": 0.125} for name in MODELS} | {"convnet": {"width": 4}, "tinynet": {"width": 4}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 64, 64), (2, 32, 48)])
def test_models_learn_from_images_of_every_size(name, shape):
    model = build(name, num_classes=7, shape=shape, **SMALL[name])
    images = torch.rand(2, *shape, requires_grad=True)
    logits = model(images)
    assert logits.shape == (2, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert images.grad is not None and bool(images.grad.any())
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), key


@pytest.mark.parametrize("name", ["convnet", "resnet8", "vgg8"])
def test_small_models_take_tiny_images(name):
    assert build(name, num_classes=3, shape=(1, 8, 8))(torch.rand(4, 1, 8, 8)).shape == (4, 3)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name):
    def made(seed: int) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(seed)
        model = build(name, num_classes=5, shape=(3, 32, 32), **SMALL[name])
        assert all(module.training for module in model.modules())
        return model.state_dict(), torch.rand(1)

    (first, after), (again, after_again), (other, _) = made(3), made(3), made(4)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert torch.equal(after, after_again)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    torch.manual_seed(3)  # the check draws no random numbers beyond what construction draws
    facts = {"num_classes": 5, "in_channels": 3, "shape": (3, 32, 32)}
    wanted = inspect.signature(MODELS[name].factory).parameters
    MODELS[name].factory(**{key: value for key, value in facts.items() if key in wanted}, **SMALL[name])
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_loads_strictly(name):
    first = build(name, num_classes=5, shape=(3, 32, 32), **SMALL[name])
    second = build(name, num_classes=5, shape=(3, 32, 32), **SMALL[name])
    second.load_state_dict(first.state_dict(), strict=True)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(first.eval()(images), second.eval()(images))


@pytest.mark.parametrize("name", MODELS)
def test_descriptions_are_a_line(name):
    assert 10 < len(MODELS[name].description) < 90
    assert "\n" not in MODELS[name].description


def test_the_published_window_is_the_global_average():
    model = build("resnet18", num_classes=10, shape=(3, 32, 32), width=0.125).eval()
    maps: list[Tensor] = []
    model.layer4.register_forward_hook(lambda *arguments: maps.append(arguments[2]))
    logits = model(torch.rand(2, 3, 32, 32))
    window = nn.functional.avg_pool2d(maps[0], 4).flatten(1)
    assert torch.allclose(model.linear(window), logits, atol=1e-6)


def test_convnet_by_width_and_depth():
    model = build("convnet", num_classes=10, shape=(1, 28, 28))
    shapes = [tuple(layer.weight.shape) for layer in layers(model).values()]
    assert [shape[0] for shape in shapes] == [32, 64, 64, 64, 128, 10]
    assert shapes[4][1] == 64 * 7 * 7
    assert len(layers(build("convnet", num_classes=10, shape=(1, 8, 8), width=8, depth=6))) == 8


@pytest.mark.parametrize(("name", "factors"), [("tinynet", (1, 2, 4, 4, 8)), ("convnet", (1, 2, 2, 2, 4))])
@pytest.mark.parametrize("width", [0.01, 0.3, 1, 1.5, 2.25, 5])
def test_small_networks_take_real_widths(name, factors, width):
    model = build(name, num_classes=10, shape=(1, 8, 8), width=width)
    found = [layer.weight.shape[0] for layer in layers(model).values()]
    assert found == [*(max(1, round(factor * width)) for factor in factors), 10]


# ---------------------------------------------------------------- normalisation


def test_normalisation_is_inside_the_model():
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    model = build("resnet8", num_classes=10, shape=(3, 32, 32), normalize=(mean, std)).eval()
    assert isinstance(model, Normalized)
    images = torch.rand(2, 3, 32, 32)
    outside = (images - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    assert torch.allclose(model(images), model.net(outside))
    assert dict(model.named_buffers()).keys() >= {"mean", "std"}
    assert not {"mean", "std"} & dict(model.named_parameters()).keys()
    assert model.double().mean.dtype == torch.float64


def test_invalid_normalisation_is_refused():
    assert "2 channels, the data has 3" in refused("resnet8", normalize=([0.5] * 2, [0.5] * 2))
    assert "3 means and 1 stds" in refused("resnet8", normalize=([0.5] * 3, [0.5]))
    assert "std above 0" in refused("resnet8", normalize=([0.5] * 3, [0.5, 0.0, 0.5]))
    assert "finite" in refused("resnet8", normalize=([float("nan")] * 3, [0.5] * 3))


# ---------------------------------------------------------------- requests that can't be met


def test_unknown_names():
    assert "did you mean 'vgg16'?" in refused("vgg61")
    assert "did you mean 'wrn-28-10'?" in refused("wrn_28_10")
    assert all(name in refused("alexnet") for name in MODELS)
    assert "did you mean 'torchvision:'?" in refused("torchvison:")
    refused("")
    refused(":")


def test_unknown_options():
    message = refused("vgg16", widht=2)
    assert "'widht'" in message and "it takes width" in message
    assert "width, depth" in refused("convnet", height=3)
    assert "comes from the data" in refused("vgg16", in_channels=3)


def test_invalid_values_are_refused():
    for width in (0, -1, float("nan"), float("inf"), "wide", True, None):
        assert "width" in refused("resnet18", width=width)
    assert "depth" in refused("convnet", depth=0)
    for width in (0, -2, 0.0, float("nan"), float("inf"), "wide", True, None):
        assert "number above 0" in refused("convnet", width=width)
        assert "number above 0" in refused("tinynet", width=width)
    assert "at least 64x64, got 32x32" in refused("convnet", depth=12)
    assert "num_classes is 0" in refused("vgg8", num_classes=0)
    assert "shape is (32, 32)" in refused("vgg8", shape=(32, 32))
    assert "shape" in refused("vgg8", shape=(3, 32, -1))
    assert "[2, 3, 8, 8]" in refused("vgg16", shape=(3, 8, 8), width=0.1)
    assert "can't build" in refused("resnet8", width=1e9)


# ---------------------------------------------------------------- torchvision and timm


def test_torchvision(vision):
    torch.manual_seed(1)
    model = build("torchvision:resnet18", num_classes=10, shape=(3, 32, 32))
    torch.manual_seed(1)
    again = build("torchvision:resnet18", num_classes=10, shape=(3, 32, 32))
    assert model.fc.out_features == 10
    assert torch.equal(model.conv1.weight, again.conv1.weight)


def test_timm(vision):
    options = {"img_size": 32, "patch_size": 4, "depth": 2}
    model = build("timm:vit_tiny_patch16_224", num_classes=10, shape=(1, 32, 32), **options)
    assert model.patch_embed.proj.weight.shape[1:] == (1, 4, 4)


def test_unknown_models_and_options_of_the_libraries_are_refused(vision):
    assert "did you mean 'resnet18'?" in refused("torchvision:resnt18")
    assert "did you mean 'vit_tiny_patch16_224'?" in refused("timm:vit_tiny_patch16_22")
    assert "3 channels, the data has 1" in refused("torchvision:resnet18", shape=(1, 32, 32))
    assert "'foo'" in refused("torchvision:resnet18", foo=1)
    assert "'foo'" in refused("timm:resnet10t", foo=1)
    assert "224" in refused("timm:vit_tiny_patch16_224", depth=1)
    assert "classification" in refused("torchvision:fasterrcnn_resnet50_fpn")


@pytest.mark.parametrize("spec", ["torchvision:resnet18", "timm:resnet18"])
@pytest.mark.parametrize("missing", ["torchvision", "timm"])
def test_a_missing_library_says_what_to_install(monkeypatch, vision, spec, missing):
    if missing == "timm" and spec.startswith("torchvision"):
        return
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=r'pip install "harp-prune\[vision\]"'):
        build(spec, num_classes=10, shape=(3, 32, 32))


def test_importing_the_models_does_not_import_torchvision():
    code = "import sys, harp.models; assert not {'torchvision', 'timm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# ---------------------------------------------------------------- the user's own file


def source(folder: Path, code: str, name: str = "mine.py") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(code)
    return str(folder / name)


LINEAR = """
from torch import nn
def net(num_classes, shape, bias=True):
    c, h, w = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, num_classes, bias=bias))
"""


def test_a_function_in_a_file(tmp_path):
    model = build(source(tmp_path, LINEAR) + ":net", num_classes=4, shape=(3, 8, 8), bias=False)
    assert model[1].weight.shape == (4, 192)
    assert model[1].bias is None


def test_a_relative_path_and_a_class(tmp_path, monkeypatch):
    source(tmp_path, "from torch import nn\nclass Net(nn.Sequential):\n"
           "    def __init__(self, in_channels: int, num_classes: int):\n"
           "        super().__init__(nn.Conv2d(in_channels, num_classes, 8), nn.Flatten())\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    model = build("mine.py:Net", num_classes=4, shape=(3, 8, 8))
    assert type(model).__name__ == "Net"
    assert type(model).__module__ in sys.modules
    assert type(model).__module__ != "mine"


def test_files_with_helpers_beside_them(tmp_path):
    before = list(sys.path)
    main = "from helper import size\nfrom torch import nn\n" + LINEAR + "    # {}\nnet.size = size\n"
    sizes = []
    for folder, size in (("a", 1), ("b", 2), ("a", 3)):
        source(tmp_path / folder, f"size = {size}\n# {'x' * size}\n", "helper.py")
        spec = source(tmp_path / folder, main) + ":net"
        model = build(spec, num_classes=4, shape=(3, 8, 8))
        assert isinstance(model, nn.Module)
        sizes.append(sys.modules["helper"].size)
    assert sizes == [1, 2, 3]
    assert sys.path == before


def test_a_helper_imported_in_the_forward_pass(tmp_path):
    source(tmp_path, "def same(x): return x\n", "late.py")
    code = LINEAR + (
        "class Late(nn.Module):\n"
        "    def __init__(self, num_classes, shape):\n"
        "        super().__init__()\n        self.net = net(num_classes, shape)\n"
        "    def forward(self, x):\n        from late import same\n        return same(self.net(x))\n"
    )
    model = build(source(tmp_path, code) + ":Late", num_classes=4, shape=(3, 8, 8))
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 4)


def test_a_changed_file_is_read_again(tmp_path):
    path = source(tmp_path, LINEAR)
    assert build(path + ":net", num_classes=4, shape=(3, 8, 8))[1].bias is not None
    source(tmp_path, LINEAR.replace("bias=True", "bias=None"))
    assert build(path + ":net", num_classes=4, shape=(3, 8, 8))[1].bias is None


def test_missing_files_and_functions_are_refused(tmp_path):
    assert "there is no file" in refused(str(tmp_path / "none.py:net"))
    path = source(tmp_path, LINEAR)
    assert "no function 'nett', did you mean 'net'?" in refused(path + ":nett")
    assert f"write {path}:FUNCTION" in refused(path)
    assert "there is no model" in refused(path + ":")


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("x = 1\nimport nowhere_to_be_found\n", ["ModuleNotFoundError", "(line 2)"]),
        ("def net(:\n", ["SyntaxError", "(line 1)"]),
        ("import sys\nsys.exit('bye')\n", ["SystemExit: bye", "(line 2)"]),
        ("def net():\n    raise KeyError('lost\\nand found')\n", ["KeyError", "lost", "(line 2)"]),
        ("def net():\n    return 3\n", ["returns a int", "torch.nn.Module"]),
        ("def net(depth):\n    return 3\n", ["'depth'", "default"]),
        ("net = 3\n", ["no function 'net'"]),
        ("\0", ["can't import"]),
        ("from torch import nn\ndef net(): return nn.Flatten()\n", ["3072 logits, the data has 10 classes"]),
        ("from torch import nn\ndef net(): return nn.Identity()\n", ["[2, 3, 32, 32]", "[2, 10]"]),
        (
            "from torch import nn\nclass net(nn.Module):\n    def forward(self, x):\n        return (x, x)\n",
            ["gives a tuple"],
        ),
        (
            "from torch import nn\nclass net(nn.Module):\n    def forward(self, x):\n        return x @ 3\n",
            ["[2, 3, 32, 32]", "TypeError", "(line 4)"],
        ),
        (
            "import torch\nclass net(torch.nn.Module):\n"
            "    def forward(self, x):\n        return torch.full((2, 10), torch.inf)\n",
            ["finite"],
        ),
    ],
)
def test_errors_in_a_file_give_one_line(tmp_path, code, parts):
    before = set(sys.modules)
    message = refused(source(tmp_path, code) + ":net")
    for part in parts:
        assert part in message
    assert "mine" not in set(sys.modules) - before


def test_options_of_a_function(tmp_path):
    path = source(
        tmp_path, LINEAR + "def rest(num_classes, shape, **more):\n    return net(num_classes, shape, **more)\n"
    )
    assert "no option 'depth': it takes bias" in refused(path + ":net", depth=3)
    assert build(path + ":rest", num_classes=4, shape=(3, 8, 8), bias=False)[1].bias is None
    assert "'depth'" in refused(path + ":rest", depth=3)


def test_the_check_changes_neither_the_model_nor_the_random_state(tmp_path):
    code = """
import torch
class net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.bn, self.frozen = torch.nn.BatchNorm2d(3), torch.nn.Dropout().eval()
        self.linear = torch.nn.LazyLinear(num_classes)
    def forward(self, x):
        return self.linear(self.bn(x + torch.rand_like(x)).flatten(1))
"""
    torch.manual_seed(5)
    model = build(source(tmp_path, code) + ":net", num_classes=4, shape=(3, 8, 8))
    assert model.training and model.bn.training and not model.frozen.training
    assert not model.bn.running_mean.any()
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)
