"""Units: what counts as prunable, and budgets as integers."""

import pytest
import torch
from torch import nn

from harp.errors import BudgetError, ModelError
from harp.units import Weights
from tests import cases


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

    units = Weights(Odd())
    assert units.names == ["plain.weight"]
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
    with pytest.raises(BudgetError, match="above 0 and at most 1"):
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
