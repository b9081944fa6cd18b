"""Units: what counts as prunable, and budgets as integers."""

import pytest
import torch
from torch import nn

from harp.errors import BudgetError, ModelError, RecipeError
from harp.pruning import macs
from harp.pruning import masks as mask_ops
from harp.pruning.methods import PRUNERS, Magnitude
from harp.pruning.units import Weights
from harp.training.loop import fit
from support import cases


def test_which_weights_count() -> None:
    assert Weights(cases.build("conv")).names == [
        "features.0.weight",
        "features.4.weight",
        "classifier.0.weight",
        "classifier.3.weight",
    ]
    transformer = Weights(cases.build("transformer"))
    assert "encoder.layers.0.self_attn.in_proj_weight" in transformer.names
    assert transformer.left_out["token"].startswith("a bare parameter")
    assert "position" in transformer.left_out
    assert Weights(cases.build("tied")).names == ["inner.weight", "up.weight", "head.weight"]


def test_embeddings_norms_and_parametrised_weights_are_left_out_with_a_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10)
            self.head.weight = self.embedding.weight  # tied to an embedding: left alone
            self.norm = nn.LayerNorm([3, 4])
            self.wrapped = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.plain = nn.Linear(4, 4)
            self.later = nn.LazyLinear(4)
            self.table = nn.Module()
            self.table.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)

    units = Weights(Odd())
    assert units.names == ["plain.weight"]
    assert units.left_out["later.weight"] == "not initialised yet: run one batch through the model first"
    assert units.left_out["table.weight"] == "of type torch.int8"
    assert units.left_out["embedding.weight"] == "an embedding"
    assert units.left_out["norm.weight"] == "belongs to a norm"
    assert "re-parametrised" in units.left_out["wrapped.parametrizations.weight.original0"]


def test_include_and_ignore_by_pattern() -> None:
    units = Weights(cases.build("transformer"), include=["position"], ignore=["encoder.*", "head"])
    assert units.names == ["position", "patch.weight"]
    with pytest.raises(ModelError, match="matches no parameter"):
        Weights(cases.build("conv"), ignore=["feature.*"])


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_senseless_budgets_are_refused(keep: float) -> None:
    with pytest.raises(BudgetError, match=r"above 0 and at most 1|more than 100 %"):
        Weights(cases.build("conv")).total(keep)


def test_a_budget_below_one_weight_a_layer_says_what_would_do() -> None:
    units = Weights(cases.build("conv"))
    with pytest.raises(BudgetError, match=r"4 layers .* at least 4"):
        units.total(0.0005)
    assert units.total(4 / sum(units.sizes)) == 4


def test_limits_are_part_of_the_budget() -> None:
    model = cases.build("conv")
    with pytest.raises(BudgetError, match="at least"):
        Weights(model, minimum={"classifier.0": 1.0}).total(0.01)
    with pytest.raises(BudgetError, match="at most"):
        Weights(model, maximum={"*": 0.5}).total(0.6)
    with pytest.raises(BudgetError, match="at least 768 and at most 76 weights"):
        Weights(model, minimum={"classifier.0": 0.75}, maximum={"classifier.0": 0.075})
    with pytest.raises(BudgetError, match="from 0 to 1"):
        Weights(model, minimum={"classifier.0": 2.0})


def test_damaged_and_unprunable_models_are_refused() -> None:
    model = cases.build("conv")
    with torch.no_grad():
        model.features[4].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"'features.4.weight' holds NaN"):
        Weights(model)
    with pytest.raises(ModelError, match="no prunable weights"):
        Weights(nn.BatchNorm2d(3))


def test_a_budget_of_macs_prices_a_weight_by_its_positions() -> None:
    units = Weights(cases.build("conv"), budget="macs", example=cases.batch()[0])
    assert units.prices == [64, 16, 1, 1]  # 8x8 images, halved once
    assert units.size == 216 * 64 + 1152 * 16 + 1024 + 64
    assert units.noun == "MACs" and units.total(0.25) == round(0.25 * units.size)
    counted = macs.cost(units.model, (3, 8, 8), Magnitude(units, 0.25).masks())
    assert counted["macs"] == units.size and 0 <= units.total(0.25) - counted["macs_kept"] < 64
    assert units.spent(Magnitude(units, 0.25).masks()) == counted["macs_kept"]
    with pytest.raises(BudgetError, match=r"of 33,344 MACs, but the 4 layers .* at least 82"):
        units.total(0.0001)


def test_what_is_used_more_often_costs_more() -> None:
    tied = Weights(cases.build("tied"), budget="macs", example=cases.batch()[0])
    assert tied.prices == [1, 2, 1]
    packed = Weights(cases.build("transformer"), budget="macs", example=cases.batch()[0])
    prices = dict(zip(packed.names, packed.prices, strict=True))
    assert prices["encoder.layers.0.self_attn.in_proj_weight"] == 5  # four patches and a class token
    assert prices["patch.weight"] == 4


def test_budgets_that_can_not_be_priced_are_refused() -> None:
    model = cases.build("transformer")
    with pytest.raises(RecipeError, match="unknown budget of single weights 'bytes': one of weights, macs"):
        Weights(model, budget="bytes")
    with pytest.raises(RecipeError, match="give an `example`"):
        Weights(model, budget="macs")
    with pytest.raises(ModelError, match="can't price weight 'position'"):
        Weights(model, budget="macs", example=cases.batch()[0], include=["position"])
    attention = nn.MultiheadAttention(4, 1, batch_first=True)

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.flatten(1)[:, :24].view(len(x), 6, 4)
            return self.attention(rows[:, :2], rows, rows)[0].flatten(1)

    with pytest.raises(ModelError, match=r"applied \[2, 6\] times"):
        Weights(Crossed(), budget="macs", example=cases.batch()[0])


def test_include_takes_all_that_can_be_masked_and_says_what_can_not() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(10, 4), nn.LayerNorm(4)
            self.kernel = nn.Parameter(torch.randn(4, 4))
            self.wrapped = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.wrapped(self.norm(self.embedding(x).mean(1)) @ self.kernel)

    model = Table()
    with pytest.raises(ModelError, match="no prunable weights"):
        Weights(model)
    units = Weights(model, include=["embedding", "ker*", "norm.weight"])
    assert units.names == ["kernel", "embedding.weight", "norm.weight"]
    with pytest.raises(ModelError, match=r"^include 'wrapped\.p\*': .* can't be pruned: re-parametrised: remove"):
        Weights(model, include=["wrapped.p*"])
    with pytest.raises(ModelError, match="include 'scale': 'scale' can't be pruned: a vector"):
        Weights(model, include=["kernel", "scale"])
    with pytest.raises(ModelError, match="pattern 'kernels' matches no parameter"):
        Weights(model, include=["kernels"])
    for method in ("harp", "hydra", "lamp"):
        model = Table()
        units = Weights(model, include=["embedding", "kernel", "norm.weight"])
        pruner = PRUNERS[method](units, keep=0.5)
        data = [(torch.randint(10, (8, 3)), torch.arange(8) % 4)]
        loss = lambda model, x, y, forward=None: nn.functional.cross_entropy((forward or model)(x), y)  # noqa: E731
        masks = fit(model, data, loss, pruner, epochs=2, lr=0.1).masks
        assert mask_ops.kept(masks) == 30 and all(not units.model.get_parameter(n)[~m].any() for n, m in masks.items())
