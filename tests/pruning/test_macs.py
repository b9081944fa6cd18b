"""MACs against torch's own counter, and exactly what pruning saves."""

import importlib
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.flop_counter import FlopCounterMode

from harp import models
from harp.errors import MissingExtra, ModelError
from harp.models import external
from harp.pruning.channels import Channels
from harp.pruning.macs import cost, positions, reduced
from harp.pruning.units import Weights
from support import tasks
from support.cases import CASES, build

SHAPE = (3, 8, 8)


def macs_by_torch(model: nn.Module, shape: tuple[int, ...]) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(torch.rand(1, *shape))
    return counter.get_total_flops() // 2


class Twice(nn.Module):
    """One convolution that is called twice, and a linear layer on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.rows = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(self.conv(self.conv(x))).mean((1, 2))


ODD = {
    "transposed": nn.Sequential(nn.ConvTranspose2d(3, 6, 3, stride=2, groups=3), nn.Flatten(), nn.Linear(6 * 289, 4)),
    "dilated": nn.Sequential(nn.Conv2d(3, 5, 3, dilation=2, stride=2, bias=False), nn.Flatten(), nn.Linear(20, 4)),
    "one-dimensional": nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 5, stride=3), nn.Flatten(), nn.Linear(80, 4)),
    "twice": Twice(),
}


@pytest.mark.parametrize("name", [*sorted(CASES.keys() - {"transformer"}), *ODD])
def test_macs_are_those_of_torchs_counter(name: str) -> None:
    model = build(name) if name in CASES else ODD[name]
    costs = cost(model, SHAPE)
    expected = macs_by_torch(model, SHAPE)
    assert costs["uncounted"] == []
    assert costs["macs"] == sum(layer["macs"] for layer in costs["layers"]) == expected
    assert costs["macs_kept"] == costs["macs"]
    assert costs["parameters"] == costs["parameters_kept"] == sum(p.numel() for p in model.parameters())
    assert costs["bytes_dense"] == costs["bytes_sparse"] == 4 * costs["parameters"]


def test_resnet18_on_cifar() -> None:
    costs = cost(models.build("resnet18", num_classes=10, shape=(3, 32, 32)), (3, 32, 32))
    assert costs["macs"] == 555_422_720
    assert [layer["name"] for layer in costs["layers"]][:2] == ["conv1.weight", "layer1.0.conv1.weight"]


@settings(max_examples=20, deadline=None)
@given(
    channels=st.integers(1, 3), groups=st.integers(1, 3), kernel=st.integers(1, 4), stride=st.integers(1, 3),
    padding=st.integers(0, 2), dilation=st.integers(1, 2), transposed=st.booleans(), keep=st.floats(0, 1),
)  # fmt: skip
def test_any_convolution(
    channels: int, groups: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool, keep: float
) -> None:
    kind: Any = nn.ConvTranspose2d if transposed else nn.Conv2d
    shape = (channels * groups, 9, 10)
    model = kind(shape[0], 2 * groups, kernel, stride, padding, groups=groups, dilation=dilation)
    mask = torch.rand(model.weight.shape) < keep
    costs = cost(model, shape, {"weight": mask})
    assert costs["macs"] == macs_by_torch(model, shape)
    positions = costs["macs"] // model.weight.numel()
    assert positions * model.weight.numel() == costs["macs"]
    assert costs["macs_kept"] == positions * int(mask.sum())


def test_kept_macs_by_zeroed_weights_one_at_a_time() -> None:
    """The definition itself: a weight saves as many MACs as it has positions, found here by counting its uses."""
    model = nn.Conv2d(2, 3, 3, stride=2, bias=False)
    shape = (2, 7, 9)
    mask = torch.rand(model.weight.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    columns = nn.functional.unfold(torch.ones(1, *shape), 3, stride=2).shape[2]
    assert cost(model, shape, {"weight": mask})["macs_kept"] == sum(columns for _ in range(int(mask.sum())))


def test_a_transformer_by_hand() -> None:
    """Torch's counter does not know all kernels of attention."""
    costs = cost(build("transformer"), SHAPE)
    tokens = 5
    assert costs["macs"] == 4 * 16 * 48 + tokens * (3 * 256 + 256 + 2 * 512) + 16 * 4
    assert costs["uncounted"] == ["token", "position"]


def test_packed_attention_counts_the_kept_rows_of_query_key_and_value() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2)
            return self.attention(tokens[:, :1], tokens, value=tokens)[0][:, 0]

    mask = torch.zeros(24, 8, dtype=torch.bool)
    mask[:8, 0] = True  # queries: one position
    mask[16:, :2] = True  # values: three positions
    costs = cost(Cross(), (3, 2, 4), {"attention.in_proj_weight": mask})
    rows = {layer["name"]: (layer["macs"], layer["macs_kept"]) for layer in costs["layers"]}
    assert rows["attention.in_proj_weight"] == (64 + 3 * 64 + 3 * 64, 8 + 3 * 16)
    assert rows["attention.out_proj.weight"] == (64, 64)


def test_masks_parameters_and_bytes() -> None:
    model = build("conv")
    masks = {"classifier.0.weight": torch.zeros(16, 64, dtype=torch.bool)}
    masks["classifier.0.weight"][0, :10] = True
    costs = cost(model, SHAPE, masks)
    gone = 16 * 64 - 10
    assert costs["macs"] - costs["macs_kept"] == gone
    assert costs["parameters"] - costs["parameters_kept"] == gone
    assert costs["bytes_dense"] - costs["bytes_sparse"] == 4 * 16 * 64 - 8 * 10
    half = {"classifier.0.weight": torch.arange(16 * 64).reshape(16, 64) % 8 != 0}
    assert cost(model, SHAPE, half)["bytes_sparse"] == costs["bytes_dense"]  # with indices it would be larger


def test_without_masks_zeros_are_pruned() -> None:
    model = build("residual")
    with torch.no_grad():
        model.get_parameter("conv2.weight")[:4] = 0
    costs = cost(model, SHAPE)
    masks = {name: weight != 0 for name, weight in model.named_parameters() if weight.ndim > 1}
    assert costs == cost(model, SHAPE, masks)
    rows = {layer["name"]: layer for layer in costs["layers"]}
    assert rows["conv2.weight"]["macs_kept"] == rows["conv2.weight"]["macs"] * 3 // 4


class Counter(nn.Module):
    """Writes into a buffer and draws random numbers, even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.BatchNorm2d(3)
        self.linear = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
        return self.linear(nn.functional.dropout(x, 0.5, training=True).flatten(1))


def test_the_model_is_left_as_it_was() -> None:
    model = Counter().train()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    first, second = cost(model, SHAPE), cost(model, SHAPE)
    assert first == second
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and not model.norm.training
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_does_not_fit_together() -> None:
    model = build("conv").train()
    with pytest.raises(ModelError, match="can't run on an image of shape 1x8x8") as error:
        cost(model, (1, 8, 8))
    assert "\n" not in str(error.value)
    assert not any(module._forward_hooks for module in model.modules()) and model.training
    with pytest.raises(ModelError, match="like \\(3, 32, 32\\)"):
        cost(model, (3, 0, 8))
    with pytest.raises(ModelError, match="masks of another model"):
        cost(model, SHAPE, {"features.0.weight": torch.ones(2, 2, dtype=torch.bool)})


def test_a_tied_weight_is_one_layer_with_the_macs_of_both_uses() -> None:
    costs = cost(build("tied"), SHAPE)
    rows = {layer["name"]: layer["macs"] for layer in costs["layers"]}
    assert rows["up.weight"] == 2 * 24 * 24 and "down.weight" not in rows
    assert math.isclose(costs["macs"], 192 * 24 + 2 * 24 * 24 + 24 * 4)


def test_attention_with_queries_keys_and_values_of_different_widths() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x[:, 0, :3, :6], key=x[:, 1, :5, :4], value=x[:, 2, :5])[0].flatten(1)

    rows = {layer["name"]: layer["macs"] for layer in cost(Crossed(), SHAPE)["layers"]}
    assert rows == {
        "attention.q_proj_weight": 3 * 6 * 6,
        "attention.k_proj_weight": 5 * 6 * 4,
        "attention.v_proj_weight": 5 * 6 * 8,
        "attention.out_proj.weight": 3 * 6 * 6,
    }


def test_the_cost_of_a_smaller_network_in_terms_of_the_large_one() -> None:
    large = cost(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)), SHAPE)
    small = cost(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 4, 1)), SHAPE)
    both = reduced(large, small)
    assert (both["macs"], both["macs_kept"]) == (large["macs"], small["macs"])
    assert (both["parameters"], both["parameters_kept"]) == (large["parameters"], small["parameters"])
    assert [layer["macs_kept"] for layer in both["layers"]] == [64 * 3 * 2, 64 * 2 * 4]


class Kernels(nn.Module):
    """Bare parameters do the work, in every kind of product."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Parameter(torch.randn(6, 3, 3, 3))
        self.grouped = nn.Parameter(torch.randn(6, 2, 3, 3))
        self.transposed = nn.Parameter(torch.randn(6, 2, 2, 2))
        self.line = nn.Parameter(torch.randn(5, 4, 3))
        self.cube = nn.Parameter(torch.randn(2, 1, 2, 2, 2))
        self.rows = nn.Parameter(torch.randn(7, 10))
        self.columns = nn.Parameter(torch.randn(3, 7))
        self.batched = nn.Parameter(torch.randn(2, 7, 3))
        self.summed = nn.Parameter(torch.randn(2, 3, 4))
        self.vector = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.plane, padding=1)
        x = F.conv2d(x, self.grouped, groups=3)
        x = F.conv_transpose2d(x, self.transposed, groups=2)
        x = F.conv1d(x.flatten(2)[:, :, :30].transpose(1, 2)[:, :4].flatten(2), self.line, padding=3)
        x = F.conv3d(x.flatten(1)[:, :40].view(-1, 1, 2, 4, 5), self.cube)
        x = F.linear(x.flatten(1)[:, :20].view(-1, 2, 10), self.rows)
        x = x + x @ self.columns.t() @ self.columns
        x = torch.bmm(x.transpose(0, 1), self.batched).transpose(0, 1)
        x = torch.einsum("bnc,ncd->bnd", x, self.summed)
        return (x @ self.vector).flatten(1)


def test_bare_parameters_count_wherever_they_do_the_work() -> None:
    torch.manual_seed(0)
    model = Kernels()
    costs = cost(model, SHAPE)
    assert costs["macs"] == macs_by_torch(model, SHAPE) + 2 * 4  # torch leaves out a matrix times a vector
    assert costs["products"] == 0 and costs["uncounted"] == []
    assert {layer["name"] for layer in costs["layers"]} == {name for name, _ in model.named_parameters()}
    assert positions(model, SHAPE) | {"columns": 4, "plane": 64} == positions(model, SHAPE)


def test_masks_of_bare_parameters_save_their_positions() -> None:
    torch.manual_seed(0)
    model = Kernels()
    masks = {name: torch.rand(weight.shape) < 0.4 for name, weight in model.named_parameters()}
    costs, applied = cost(model, SHAPE, masks), positions(model, SHAPE)
    masked = {name: weight.detach() * masks[name] for name, weight in model.named_parameters()}
    assert costs["macs_kept"] == sum(applied[n] * int(m.sum()) for n, m in masks.items()) < costs["macs"]
    model.load_state_dict(masked)
    assert cost(model, SHAPE)["macs_kept"] == sum(applied[n] * int(m.sum()) for n, m in masks.items())


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, weight_norm])
def test_weights_that_are_computed_count_for_the_parameter_they_come_from(wrap: Any) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight norm
        layer = wrap(nn.Conv2d(3, 5, 3))
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(180, 4))
    costs = cost(model, SHAPE)
    assert costs["macs"] == macs_by_torch(model, SHAPE) == 36 * 135 + 720
    assert [layer["macs"] for layer in costs["layers"]] == [36 * 135, 720]
    with torch.no_grad():
        name = next(layer["name"] for layer in costs["layers"])
        model.get_parameter(name)[:, 0] = 0
    assert cost(model, SHAPE)["macs_kept"] == 36 * 90 + 720
    assert cost(model, SHAPE, {})["macs_kept"] == costs["macs"], "all are kept"


def test_products_of_activations_are_counted_apart() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x.flatten(1, 2)).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v).mean((1, 2))

    model = Attention()
    costs = cost(model, SHAPE)
    tokens = 24
    assert costs["macs"] == tokens * 8 * 24
    assert costs["products"] == 2 * 2 * tokens * tokens * 4


def test_recurrent_layers_count_their_steps() -> None:
    class Lines(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.layer = kind(24, 6, num_layers=2, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(1, 2).flatten(2))[0][:, -1]

    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        costs = cost(Lines(kind), SHAPE)
        assert costs["macs"] == 8 * 2 * gates * 6 * (24 + 6 + 12 + 6), kind
        assert costs["uncounted"] == []


def test_a_constant_that_the_input_is_written_into_is_no_weight() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 4, 8))
            self.scale = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            table = torch.zeros_like(self.scale) + self.scale
            table[:2] = x[0, 0, :2]
            self.cache[:] = x[:, 0, :4]
            return x[:, 0] @ table.t() + (x[:, 0] @ self.cache[0].t())

    costs = cost(Written(), SHAPE)
    assert (costs["macs"], costs["products"]) == (0, 2 * 8 * 8 * 4)


def test_tokens_and_several_inputs_are_given_as_an_example() -> None:
    for task in ("tokens", "pair"):
        model = tasks.build(task)
        x, _ = tasks.TASKS[task][1]().split(tasks.batch(task))
        assert cost(model, x)["macs"] > 0
        units = Weights(model, budget="macs", example=x)
        assert units.size == sum(layer["macs"] for layer in cost(model, x)["layers"] if layer["name"] in units.names)
    with pytest.raises(ModelError, match="can't run on an example of shape \\(2, 5\\)"):
        cost(model, torch.rand(2, 5))


class Mixed(nn.Module):
    """A function with a bare kernel between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kernel = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(0.1 * torch.randn(8, 8, 3, 3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.conv2d(F.relu(self.first(x)), self.kernel, padding=1)).mean((2, 3)))


@pytest.mark.parametrize("model", [Mixed(), build("conv"), build("residual"), tasks.build("segmentation")])
def test_the_budget_of_channels_counts_the_same(model: nn.Module) -> None:
    units = Channels(model, torch.rand(2, *SHAPE), budget="macs")
    assert units.size == cost(model, SHAPE)["macs"] == macs_by_torch(model, SHAPE)


SMALL = ["mobilenet_v3_small", "squeezenet1_1"]
LARGE = ["efficientnet_b0", "googlenet", "regnet_y_400mf", "densenet121", "swin_t", "convnext_tiny", "maxvit_t"]
TIMM = ["vit_tiny_patch16_224", "gmlp_ti16_224", "coat_tiny", "xcit_nano_12_p16_224", "levit_128s", "nf_resnet50"]
WINDOWS = {"swin_t", "maxvit_t"}  # which need images of 224 x 224


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(n, marks=pytest.mark.slow) for n in (*LARGE, *TIMM))])
def test_the_zoo_against_torchs_counter(name: str) -> None:
    try:
        vision, timm = external.import_torchvision(), importlib.import_module("timm")
    except (MissingExtra, ImportError):
        pytest.skip("torchvision and timm are not installed")
    large = name in TIMM or name in WINDOWS
    shape = (3, 224, 224) if large else (3, 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of some factories
        model = timm.create_model(name) if name in TIMM else vision.models.get_model(name, weights=None)
    costs = cost(model, shape)
    with sdpa_kernel(SDPBackend.MATH):  # torch does not count all others
        assert costs["macs"] + costs["products"] == macs_by_torch(model, shape)
