"""Checkpoints of RobustBench, by the published names and shapes of their tensors. No checkpoint is needed here."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harp.errors import CheckpointError, ModelError
from harp.models import MODELS, Normalized, build
from harp.models.robustbench import PUBLISHED
from harp.models.weights import load_weights

State = dict[str, Tensor]
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)


class Writer:
    """Writes the published names down, with random tensors."""

    def __init__(self) -> None:
        self.state: State = {}
        self.generator = torch.Generator().manual_seed(0)

    def conv(self, name: str, channels: int, out: int, size: int) -> None:
        std = (2 / (channels * size * size)) ** 0.5
        self.state[f"{name}.weight"] = torch.randn(out, channels, size, size, generator=self.generator) * std

    def norm(self, name: str, channels: int) -> None:
        for key in ("weight", "bias", "running_mean", "running_var"):
            self.state[f"{name}.{key}"] = torch.rand(channels, generator=self.generator) + 0.5 * (key != "bias")
        self.state[f"{name}.num_batches_tracked"] = torch.tensor(7)

    def linear(self, name: str, features: int, classes: int) -> None:
        self.state[f"{name}.weight"] = torch.randn(classes, features, generator=self.generator) / features**0.5
        self.state[f"{name}.bias"] = torch.randn(classes, generator=self.generator)


def norm(state: State, name: str, x: Tensor) -> Tensor:
    part = {key: state[f"{name}.{key}"] for key in ("running_mean", "running_var", "weight", "bias")}
    return F.batch_norm(x, part["running_mean"], part["running_var"], part["weight"], part["bias"], eps=1e-5)


def same_pad(x: Tensor, stride: int) -> Tensor:
    """The padding of TensorFlow for a 3x3 convolution."""
    return F.pad(x, (1, 1, 1, 1) if stride == 1 else (0, 1, 0, 1))


def swish18() -> tuple[State, Callable[[State, Tensor], Tensor]]:
    w = Writer()
    w.conv("conv_2d", 3, 64, 3)
    plan = [
        (f"layer_{i}.{j}", (64, 64, 128, 256, 512)[i + j], (64, 128, 256, 512)[i]) for i in range(4) for j in (0, 1)
    ]
    plan = [(name, before if name.endswith(".0") else out, out) for name, before, out in plan]
    for name, before, out in plan:
        w.norm(f"{name}.batchnorm_0", before)
        w.conv(f"{name}.conv_2d_1", before, out, 3)
        w.norm(f"{name}.batchnorm_1", out)
        w.conv(f"{name}.conv_2d_2", out, out, 3)
        if before != out:
            w.conv(f"{name}.shortcut", before, out, 3)
    w.norm("batchnorm", 512)
    w.linear("logits", 512, 10)

    def forward(s: State, x: Tensor) -> Tensor:
        x = F.conv2d(x, s["conv_2d.weight"], padding=1)
        for name, before, out in plan:
            stride = 1 if before == out else 2
            a = norm(s, f"{name}.batchnorm_0", x)
            y = F.conv2d(same_pad(a * torch.sigmoid(a), stride), s[f"{name}.conv_2d_1.weight"], stride=stride)
            b = norm(s, f"{name}.batchnorm_1", y)
            y = F.conv2d(b * torch.sigmoid(b), s[f"{name}.conv_2d_2.weight"], padding=1)
            short = s.get(f"{name}.shortcut.weight")
            x = y + (x if short is None else F.conv2d(same_pad(x, stride), short, stride=stride))
        x = norm(s, "batchnorm", x)
        x = F.avg_pool2d(x * torch.sigmoid(x), 4).flatten(1)
        return F.linear(x, s["logits.weight"], s["logits.bias"])

    return w.state, forward


def preact18(final_norm: bool) -> tuple[State, Callable[[State, Tensor], Tensor]]:
    w = Writer()
    w.conv("conv1", 3, 64, 3)
    widths = (64, 64, 128, 256, 512)
    plan = [(f"layer{i}.{j}", widths[i - 1] if j == 0 else widths[i], widths[i]) for i in (1, 2, 3, 4) for j in (0, 1)]
    for name, before, out in plan:
        w.norm(f"{name}.bn1", before)
        w.conv(f"{name}.conv1", before, out, 3)
        w.norm(f"{name}.bn2", out)
        w.conv(f"{name}.conv2", out, out, 3)
        if before != out:
            w.conv(f"{name}.shortcut.0", before, out, 1)
    if final_norm:
        w.norm("bn", 512)
    w.linear("linear", 512, 10)

    def forward(s: State, x: Tensor) -> Tensor:
        x = F.conv2d(x, s["conv1.weight"], padding=1)
        for name, before, out in plan:
            stride = 1 if before == out else 2
            a = F.relu(norm(s, f"{name}.bn1", x))
            y = F.conv2d(a, s[f"{name}.conv1.weight"], padding=1, stride=stride)
            y = F.conv2d(F.relu(norm(s, f"{name}.bn2", y)), s[f"{name}.conv2.weight"], padding=1)
            short = s.get(f"{name}.shortcut.0.weight")
            x = y + (x if short is None else F.conv2d(a if final_norm else x, short, stride=stride))
        x = F.relu(norm(s, "bn", x)) if final_norm else x
        return F.linear(F.avg_pool2d(x, 4).flatten(1), s["linear.weight"], s["linear.bias"])

    return w.state, forward


def wide(names: dict[str, str], widths: tuple[int, ...], blocks: int) -> State:
    """A wide network by its names of things; TRADES' code also declares a block that it never uses."""
    w = Writer()
    w.conv(names["stem"], 3, 16, 3)
    for group, (before, out) in enumerate(zip((16, *widths), widths, strict=False), 1):
        for copy in [*names["group"].split(",")] if group == 1 else names["group"].split(",")[:1]:
            for block in range(blocks):
                name = copy.format(group, group - 1, block)
                w.norm(f"{name}.{names['norm'].format(1, 0)}", before if block == 0 else out)
                w.conv(f"{name}.{names['conv'].format(1, 0)}", before if block == 0 else out, out, 3)
                w.norm(f"{name}.{names['norm'].format(2, 1)}", out)
                w.conv(f"{name}.{names['conv'].format(2, 1)}", out, out, 3)
                if block == 0:
                    w.conv(f"{name}.{names['short']}", before, out, 1)
    w.norm(names["last"], widths[-1])
    w.linear(names["linear"], widths[-1], 10)
    return w.state


TRADES = {"stem": "conv1", "group": "block{0}.layer.{2},sub_block{0}.layer.{2}", "norm": "bn{0}", "conv": "conv{0}"}
TRADES |= {"short": "convShortcut", "last": "bn1", "linear": "fc"}
DEEPMIND = {"stem": "init_conv", "group": "layer.{1}.block.{2}", "norm": "batchnorm_{1}", "conv": "conv_{1}"}
DEEPMIND |= {"short": "shortcut", "last": "batchnorm", "linear": "logits"}


def saved(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    return path


@torch.no_grad()
@pytest.mark.parametrize("name", ["Rade2021Helper_R18_ddpm", "Wong2020Fast", "l2/Rice2020Overfitting"])
def test_the_network_answers_as_the_published_one(tmp_path, name):
    state, forward = swish18() if name.startswith("Rade") else preact18(final_norm=name.startswith("l2"))
    model = build(f"robustbench:{name}:{saved(tmp_path, state)}", num_classes=10, shape=(3, 32, 32)).eval()
    x = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))
    expected = forward(state, (x - mean) / std)
    assert torch.allclose(model(x), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "names", "widths", "blocks"),
    [
        ("Carmon2019Unlabeled", TRADES, (160, 320, 640), 4),
        ("Gowal2021Improving_28_10_ddpm_100m", DEEPMIND, (160, 320, 640), 4),
        ("Zhang2019Theoretically", TRADES, (160, 320, 640), 5),
    ],
)
def test_wide_networks_have_the_published_names(name, names, widths, blocks):
    with torch.device("meta"):
        model = MODELS[PUBLISHED[name].model].factory(num_classes=10, **PUBLISHED[name].options)
    with torch.device("meta"):
        expected = {key: tensor.shape for key, tensor in model.state_dict().items()}
    published = {key: t.shape for key, t in wide(names, widths, blocks).items() if not key.startswith("sub_block1.")}
    assert published == expected


def test_names_stand_for_models_of_the_table():
    for name, published in PUBLISHED.items():
        with torch.device("meta"):
            model = MODELS[published.model].factory(num_classes=10, **published.options)
        assert sum(p.numel() for p in model.parameters()) > 1e7, name
        if published.model.startswith("swish"):  # they all normalise
            assert published.normalize is not None


SMALL = {"depth": 10, "widen": 1, "width": 0.25}
WRAPPINGS: dict[str, Callable[[State], object]] = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "model_state_dict": lambda s: {"model_state_dict": s, "unaveraged_model_state_dict": {}},
    "net": lambda s: {"net": s, "acc": 0.5},
    "ema": lambda s: {"ema": s},
    "module": lambda s: {"module." + key: tensor for key, tensor in s.items()},
    "model": lambda s: {"state_dict": {"model." + key: tensor for key, tensor in s.items()}},
    "both": lambda s: {"module.model." + key: tensor for key, tensor in s.items()},
    "unused": lambda s: {**s, **{"sub_" + key: t for key, t in s.items() if key.startswith("block1.")}},
    "old": lambda s: {key: tensor for key, tensor in s.items() if not key.endswith("num_batches_tracked")},
    "mu": lambda s: {"mu": torch.tensor(MEAN).view(1, 3, 1, 1), "sigma": torch.tensor(STD).view(1, 3, 1, 1), **s},
    "normalize": lambda s: {
        "normalize.mean": torch.tensor(MEAN),
        "normalize.std": torch.tensor(STD),
        **{"model." + key: tensor for key, tensor in s.items()},
    },
}


def small() -> torch.nn.Module:
    return build("wrn", num_classes=10, shape=(3, 32, 32), normalize=(MEAN, STD), **SMALL)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_usual_wrappings_are_seen_through(tmp_path, wrapping):
    parent, child = small(), small()
    assert isinstance(parent, Normalized) and isinstance(child, Normalized)
    path = saved(tmp_path, WRAPPINGS[wrapping](parent.net.state_dict()))
    load_weights(child, path)
    for key, tensor in parent.state_dict().items():
        assert torch.equal(tensor, child.state_dict()[key]), key


def test_other_constants_of_normalisation_are_refused(tmp_path):
    path = saved(tmp_path, {"mu": torch.tensor([0.5] * 3), "sigma": torch.tensor(STD), **small().net.state_dict()})
    with pytest.raises(CheckpointError, match=r"first 'mu'.*does not have: --normalize 0\.5,0\.5,0\.5"):
        load_weights(small(), path)
    plain = build("wrn", num_classes=10, shape=(3, 32, 32), **SMALL)
    with pytest.raises(CheckpointError, match=r"--normalize 0\.5,0\.5,0\.5/0\.2471"):
        load_weights(plain, path)


def test_missing_and_unexpected_tensors_are_refused_by_name(tmp_path):
    state = small().net.state_dict()
    del state["block2.layer.0.conv1.weight"]
    state["sub_block1.extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        load_weights(small(), saved(tmp_path, state))
    assert "block2.layer.0.conv1.weight'), 1 unexpected (first 'sub_block1.extra')" in str(caught.value)


def test_a_checkpoint_that_needs_code_is_refused(tmp_path):
    path = saved(tmp_path, {"state_dict": small().net.state_dict(), "args": Path("code")})
    with pytest.raises(CheckpointError, match="only tensors and plain values"):
        build(f"robustbench:Sehwag2021Proxy_R18:{path}", num_classes=10, shape=(3, 32, 32))


def test_names_that_are_no_checkpoint_are_refused(tmp_path):
    path = saved(tmp_path, {})
    for spec, words in [
        (f"robustbench:Rade2021Helper_R18_dpm:{path}", "did you mean Rade2021Helper_R18_ddpm"),
        (f"robustbench:zzz:{path}", "which are"),
        ("robustbench:Wong2020Fast", "write robustbench:Wong2020Fast:FILE"),
        (f"robustbench:Wong2020Fast:{tmp_path / 'none.pt'}", "there is no file"),
    ]:
        with pytest.raises(ModelError, match=words):
            build(spec, num_classes=10, shape=(3, 32, 32))
    with pytest.raises(ModelError, match="its own normalisation"):
        build(f"robustbench:Wong2020Fast:{path}", num_classes=10, shape=(3, 32, 32), width=0.5)
