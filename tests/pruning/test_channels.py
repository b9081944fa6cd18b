"""Channels as units: their scores are sums over what reads them, and their costs are the paper's."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from harp import models
from harp.errors import ModelError, RecipeError
from harp.pruning import masks as mask_ops
from harp.pruning.channels import Channels, Cut, attention, rebuild
from support.paths import ROOT
from support.slimmed import draw


class Mixed(nn.Module):
    """A convolution, a transposed one, and a linear layer behind a flattening: no two sizes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3)
        self.plain = nn.Conv2d(5, 7, (2, 3))
        self.up = nn.ConvTranspose2d(7, 6, (3, 2), stride=2)
        self.pool = nn.AdaptiveAvgPool2d((2, 3))
        self.linear = nn.Linear(36, 11)
        self.head = nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.plain(self.stem(x).relu()).relu()).relu()
        return self.head(self.linear(self.pool(x).flatten(1)).relu())


def by_hand(model: Mixed) -> list[list[float]]:
    """The sum of magnitudes over all weights that each input channel is multiplied by."""
    model = copy.deepcopy(model).requires_grad_(False)
    plain = [0.0] * 5
    for out in range(7):
        for channel in range(5):
            for i in range(2):
                for j in range(3):
                    plain[channel] += abs(float(model.plain.weight[out, channel, i, j]))
    up = [0.0] * 7
    for channel in range(7):
        for out in range(6):
            for i in range(3):
                for j in range(2):
                    up[channel] += abs(float(model.up.weight[channel, out, i, j]))
    linear = [0.0] * 6
    for out in range(11):
        for channel in range(6):
            for position in range(6):
                linear[channel] += abs(float(model.linear.weight[out, 6 * channel + position]))
    head = [sum(abs(float(model.head.weight[out, channel])) for out in range(4)) for channel in range(11)]
    return [plain, up, linear, head]


def test_a_channels_strength_is_the_sum_of_all_that_reads_it() -> None:
    model = Mixed()
    units = Channels(model, torch.rand(1, 3, 9, 8))
    assert units.names == ["plain.weight", "up.weight", "linear.weight", "head.weight"]
    assert units.sizes == [5, 7, 6, 11]
    for ours, theirs in zip(units.strength(units.weights, 1), by_hand(model), strict=True):
        assert ours.tolist() == pytest.approx(theirs, rel=1e-5)
    squares = units.strength(units.weights, 2)[0].square()
    assert torch.allclose(squares, model.plain.weight.square().sum(dim=(0, 2, 3)), rtol=1e-5)


def test_a_residual_streams_strength_adds_all_its_readers() -> None:
    model = models.build("resnet8", num_classes=10, shape=(3, 32, 32), width=0.5)
    units = Channels(model, torch.rand(1, 3, 32, 32))
    number = max(range(len(units.spaces)), key=lambda n: len(units.spaces[n].readers))
    space = units.spaces[number]
    assert len(space.readers) > 1
    expected = sum(model.get_parameter(name).abs().sum(dim=(0, 2, 3)) for name in space.readers)
    assert torch.allclose(units.strength(units.weights, 1)[number], expected, rtol=1e-5)


def test_gathered_gradients_are_those_of_the_masks() -> None:
    model = Mixed()
    units = Channels(model, torch.rand(1, 3, 9, 8))
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(size, generator=generator).requires_grad_() for size in units.sizes]
    gradients = [torch.randn(weight.shape, generator=generator) for weight in units.weights]
    alive = dict(zip(units.masked, (m for m in units.expand([m > -1 for m in masks]).values()), strict=True))
    assert all(bool(mask.all()) for mask in alive.values())
    columns = [
        masks[0][None, :, None, None],
        masks[1][:, None, None, None],
        masks[2].repeat_interleave(6)[None],
        masks[3][None],
    ]
    sum((g * column).sum() for g, column in zip(gradients, columns, strict=True)).backward()
    for ours, mask in zip(units.gather(gradients), masks, strict=True):
        assert ours is not None and torch.allclose(ours, mask.grad, rtol=1e-4, atol=1e-5)
    assert units.gather([None] * 4) == [None] * 4
    first, *others = units.gather([gradients[0], None, None, None])
    assert first is not None and torch.allclose(first, gradients[0].sum(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert all(other is not None and not other.any() for other in others)


@pytest.fixture(scope="module")
def vgg16() -> Channels:
    return Channels(models.build("vgg16", num_classes=10, shape=(3, 32, 32)), torch.rand(1, 3, 32, 32))


def test_vgg16_costs_the_papers_flops(vgg16: Channels) -> None:
    assert vgg16.size == 627_854_858
    by_layer = 0
    sizes = [32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2]
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    for size, channels, out in zip(sizes, widths, widths[1:], strict=False):
        by_layer += size * size * out * (2 * 9 * channels + 1)
    linears = [module for module in vgg16.model.modules() if isinstance(module, nn.Linear)]
    by_layer += sum(layer.out_features * (2 * layer.in_features + 1) for layer in linears)
    assert vgg16.size == by_layer


@pytest.mark.parametrize(("share", "factor"), [(0.707, 2), (0.5, 4), (0.317, 10), (0.224, 20)])
def test_a_share_of_all_channels_saves_its_square(vgg16: Channels, share: float, factor: int) -> None:
    assert vgg16.size / vgg16.spend([round(share * size) for size in vgg16.sizes]) == pytest.approx(factor, rel=0.03)


def test_what_masks_leave_unread_is_what_is_cut() -> None:
    model = Mixed()
    units = Channels(model, torch.rand(1, 3, 9, 8))
    wanted = draw(units, 0.5, torch.Generator().manual_seed(1))
    masks = units.expand(wanted)
    assert list(masks) == units.masked
    assert all(torch.equal(ours, mask) for ours, mask in zip(units.alive(masks), wanted, strict=True))
    cut = units.cut(masks)
    assert cut.kept["plain.weight"] == {
        1: wanted[0].nonzero().flatten().tolist(),
        0: wanted[1].nonzero().flatten().tolist(),
    }
    small = Cut.from_dict(cut.as_dict()).applied(model)
    assert [small.stem.out_channels, small.plain.in_channels] == [int(wanted[0].sum())] * 2
    assert [small.up.in_channels, small.up.out_channels] == [int(wanted[1].sum()), int(wanted[2].sum())]
    assert small.linear.in_features == 6 * int(wanted[2].sum())
    widened = cut.widen("linear.weight", small.linear.weight)
    assert torch.equal(widened, model.linear.weight * masks["linear.weight"] * wanted[3][:, None])
    assert torch.equal(cut.widen("head.bias", small.head.bias), model.head.bias)
    full = cut.spread("linear.weight", small.linear.weight, torch.zeros_like(model.linear.weight))
    assert torch.equal(full, model.linear.weight * masks["linear.weight"] * wanted[3][:, None])


def test_what_was_frozen_stays_frozen_in_the_smaller_network() -> None:
    model = Mixed()
    frozen = {"plain.weight", "linear.bias"}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    units = Channels(model, torch.rand(1, 3, 9, 8))
    masks = units.expand(draw(units, 0.5, torch.Generator().manual_seed(1)))
    mask_ops.apply(model, masks)
    small = units.slim(model, masks)
    assert all(small.get_parameter(name).shape < model.get_parameter(name).shape for name in frozen)
    assert {name for name, parameter in small.named_parameters() if not parameter.requires_grad} == frozen


def test_an_attention_with_fewer_heads_can_be_cut_again() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 20, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), Tokens(), layer, nn.Flatten(), nn.Linear(64, 4)).eval()
    example = torch.rand(1, 3, 8, 8)
    for heads in (3, 2):
        units = Channels(model, example)
        wanted = [torch.arange(size) < (heads if size <= 4 else size) for size in units.sizes]
        masks = units.expand(wanted)
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)
        model = units.slim(model, masks)
        assert model[3].self_attn.num_heads == heads
        assert model[3].self_attn.in_proj_weight.shape == (3 * heads * 4, 16)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def test_attention_takes_all_kinds_of_masks() -> None:
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    ours = attention.Attention.of(theirs)
    x = torch.rand(2, 5, 12)
    hidden = torch.rand(5, 5) < 0.3
    hidden.fill_diagonal_(False)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    by_head = torch.randn(2 * 3, 5, 5)
    for options in (
        {},
        {"attn_mask": hidden},
        {"attn_mask": torch.randn(5, 5)},
        {"attn_mask": by_head},
        {"key_padding_mask": padding},
    ):
        expected = theirs(x, x, x, need_weights=False, **options)[0]
        assert torch.allclose(ours(x, x, x, **options)[0], expected, atol=1e-6)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_a_saved_network_is_rebuilt_without_the_cut(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 20, dropout=0.0, batch_first=True)
    parts = [nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), Tokens(), layer, nn.Flatten(), nn.Linear(64, 4)]
    model, example = nn.Sequential(*parts).eval(), torch.rand(1, 3, 8, 8)
    units = Channels(model, example)
    masks = units.expand(draw(units, 0.5, torch.Generator().manual_seed(1)))
    mask_ops.apply(model, masks)
    small = units.slim(model, masks)
    (tmp_path / "slim.json").write_text(json.dumps(units.cut(masks).as_dict()), encoding="utf-8")
    save_file(small.state_dict(), tmp_path / "model.safetensors")
    shutil.copy(attention.__file__, tmp_path / "attention.py")
    again = rebuild.rebuild(copy.deepcopy(model), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(example), small(example))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kept": 3}, "describes no smaller network"),
        ({"shapes": {"stem.weight": [1, 2, 3, 4]}}, "another model"),
        ({"kept": {"head.weight": {"7": [0]}}}, "no shape for axis 7"),
        ({"kept": {"head.weight": {"1": [10**9]}}}, "indices of 'head.weight' that are not there"),
        ({"sizes": {"nowhere": {"in_channels": 3}}}, "no such number"),
        ({"swapped": ["head"]}, "no attention of this model"),
    ],
)
def test_a_damaged_cut_changes_nothing(damage: dict[str, Any], message: str) -> None:
    model = Mixed()
    units = Channels(model, torch.rand(1, 3, 9, 8))
    content = units.cut(units.expand(draw(units, 0.5, torch.Generator().manual_seed(1)))).as_dict()
    before = {name: tensor.shape for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=message):
        Cut.from_dict({**content, **damage}).apply(model)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == before


def test_training_a_model_in_half_precision_does_not_hide_its_channels() -> None:
    model = Mixed().to(torch.bfloat16)
    assert Channels(model, torch.rand(1, 3, 9, 8)).sizes == [5, 7, 6, 11]


def test_channels_last_weights_are_shaken_as_well() -> None:
    from harp.pruning.channels.verify import perturbed

    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    nn.init.zeros_(model.weight)
    assert bool((perturbed(model).weight != 0).all())


def test_unknown_budgets_and_multiples_are_refused() -> None:
    with pytest.raises(RecipeError, match="flops, macs, parameters, memory"):
        Channels(Mixed(), torch.rand(1, 3, 9, 8), budget="energy")
    with pytest.raises(RecipeError, match="multiple 0: give 1"):
        Channels(Mixed(), torch.rand(1, 3, 9, 8), multiple=0)


def test_spaces_stay_whole_on_request() -> None:
    model, example = Mixed(), torch.rand(1, 3, 9, 8)
    ignoring = Channels(model, example, ignore=["up"])
    assert ignoring.names == ["plain.weight", "head.weight"]
    assert [part.count for part in ignoring.whole if part.reason == "ignored on request"] == [7, 6]
    ends = Channels(model, example, whole_ends=True)
    assert ends.names == ["up.weight", "linear.weight"]
    assert [part.count for part in ends.whole if "ends" in part.reason] == [5, 11]


def test_patterns_must_match_a_parameter() -> None:
    with pytest.raises(ModelError, match="matches no parameter"):
        Channels(Mixed(), torch.rand(1, 3, 9, 8), ignore=["nothing.*"])


def test_the_documentations_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "channels.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(example.replace("32, 32))", "32, 32), width=0.25)", 1), "docs/how-to/channels.md", "exec"), scope)
    share = scope["units"].spent(scope["masks"]) / scope["units"].size
    assert capsys.readouterr().out.endswith(f"{share:.1%} of the FLOPs\n")
    assert share == pytest.approx(0.25, abs=0.02)
    left, before = (sum(p.numel() for p in scope[name].parameters()) for name in ("small", "model"))
    assert left < 0.4 * before
