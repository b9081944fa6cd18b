"""The check-up and the plan: what can be pruned of a model, what can't and why, and what a budget would leave."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harp.cli import output
from harp.errors import BudgetError, RecipeError
from harp.evaluation import model_checks
from harp.experiments import plan
from harp.pruning.channels import Channels
from harp.pruning.macs import cost
from harp.pruning.units import Weights
from support import cases


def examined(model: nn.Module, **options: Any) -> model_checks.Examination:
    return model_checks.examine(model, *cases.batch(8), **options)


def finding(found: model_checks.Examination, check: str) -> model_checks.Finding:
    (one,) = [each for each in found.findings if each.check == check]
    return one


def test_channel_spaces_list_their_readers_and_givers() -> None:
    found = examined(cases.build("residual"))
    stem, *_ = found.spaces
    assert stem["name"] == "conv1.weight" and stem["size"] == 8
    assert stem["readers"] == ["conv1.weight", "shortcut.weight"]
    assert stem["givers"] == ["stem.weight"], "matrices only: norms are not what a channel comes from"
    assert all(0 < each["share"] <= 1 for each in found.spaces)
    assert finding(found, "channels").verdict == "good"
    assert f"{sum(each['size'] for each in found.spaces)} channels in {len(found.spaces)} groups" in (
        finding(found, "channels").text
    )
    assert found.healthy


def test_the_share_of_the_flops_is_that_of_the_weights_that_it_lies_along() -> None:
    model = cases.build("conv")
    shares = {each["name"]: each["share"] for each in examined(model).spaces}
    macs = {layer["name"]: layer["macs"] for layer in cost(model, (3, 8, 8), {})["layers"]}
    hidden = (macs["classifier.0.weight"] + macs["classifier.3.weight"]) / sum(macs.values())
    assert shares["classifier.3.weight"] == pytest.approx(hidden, rel=0.15), "FLOPs count additions and biases too"


def test_channels_that_stay_are_grouped_by_reason() -> None:
    found = examined(cases.build("residual"))
    reasons = [part["reason"] for part in found.whole]
    assert len(set(reasons)) == len(reasons) > 0
    (first,) = [part for part in found.whole if "stem.weight" in part["readers"]]
    assert first["count"] == 3 and "input" in first["reason"]
    content = found.as_dict()
    assert content["spaces"] == found.spaces and content["whole"] == found.whole


def test_a_model_without_channels_is_worth_a_look_and_no_failure() -> None:
    found = examined(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4)))
    one = finding(found, "channels")
    assert one.verdict == "look" and "no channels that can be pruned" in one.text
    assert found.healthy and found.spaces == [] and found.layers


class Odd(nn.Module):
    """It takes batches of eight only."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cases.build("conv")

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 8:
            raise KeyError("eight images\nare a batch")
        return self.net(x)


def test_a_model_that_can_not_be_followed_is_worth_a_look() -> None:
    model = Odd()
    modes = [module.training for module in model.modules()]
    one = finding(examined(model), "channels")
    assert one.verdict == "look" and "eight images" in one.text and "\n" not in one.text
    assert [module.training for module in model.modules()] == modes


def test_channels_can_be_left_out() -> None:
    found = examined(cases.build("conv"), channels=False)
    assert found.spaces == [] and not [each for each in found.findings if each.check == "channels"]


def test_a_plan_of_channels_meets_its_budget_and_predicts_the_network() -> None:
    units = plan.Subject("resnet8").units(channels=True, multiple=4)
    assert isinstance(units, Channels)
    layers = plan.spread(units, "uniform", 0.25)
    counts = [layer["kept"] for layer in layers]
    totals = plan.totals(units, counts)
    assert list(totals) == ["FLOPs", "channels", "MACs", "parameters", "bytes"]
    assert totals["FLOPs"][1] <= 0.25 * totals["FLOPs"][0] < totals["FLOPs"][0]
    assert all(count % 4 == 0 for count in counts)
    masks = [torch.arange(size) < count for size, count in zip(units.sizes, counts, strict=True)]
    dense, small = units.model, units.cut(units.expand(masks)).applied(units.model)
    for words, net in ((0, dense), (1, small)):
        found = cost(net, (3, 32, 32), {})
        assert totals["MACs"][words] == found["macs"]
        assert totals["parameters"][words] == found["parameters"]


def test_a_plan_may_count_parameters_or_the_macs_of_single_weights() -> None:
    subject = plan.Subject("resnet8")
    units = subject.units(channels=True, budget="parameters")
    kept = [layer["kept"] for layer in plan.spread(units, "uniform", 0.5)]
    before, after = plan.totals(units, kept)["parameters"]
    assert after <= 0.5 * before and next(iter(plan.totals(units, kept))) == "parameters"
    single = subject.units(budget="macs")
    assert isinstance(single, Weights)
    totals = plan.totals(single, [layer["kept"] for layer in plan.spread(single, "uniform", 0.1)])
    assert list(totals) == ["MACs", "weights"] and totals["MACs"][1] <= 0.1 * totals["MACs"][0] + 1


def test_wrong_plans_are_one_line() -> None:
    subject = plan.Subject("resnet8")
    with pytest.raises(RecipeError, match="unknown budget of single weights 'flops': one of weights, macs"):
        subject.units(budget="flops")
    with pytest.raises(RecipeError, match="multiple 8 has no meaning for weights"):
        subject.units(multiple=8)
    units = subject.units(channels=True)
    with pytest.raises(RecipeError, match="--as-published is for budgets that count weights"):
        plan.spread(units, "uniform", 0.5, as_published=True)
    with pytest.raises(BudgetError, match="FLOPs"):
        plan.spread(units, "uniform", 1e-6)


class Voice:
    """A display that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def test_who_waits_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SLOW", 0.01)
    voice = Voice()
    with output.note_if_slow(voice, "looking"):
        for _ in range(500):
            if voice.said:
                break
            torch.randn(200, 200).sum()
    assert voice.said == ["looking"]
    monkeypatch.setattr(output, "SLOW", 60.0)
    with output.note_if_slow(voice, "quick"):
        pass
    with output.note_if_slow(voice, ""):
        pass
    assert voice.said == ["looking"]


def test_what_is_left_alone_is_counted_by_name() -> None:
    found = examined(cases.build("transformer"), channels=False)
    parameters = dict(cases.build("transformer").named_parameters())
    assert found.left_sizes == {name: parameters[name].numel() for name in found.left_out}
    assert found.left_sizes["position"] == 80
    left, whole = sum(found.left_sizes.values()), sum(p.numel() for p in parameters.values())
    one = finding(found, "prunable")
    assert f"{left:,} are left alone, {left / whole:.1%}" in one.text


def test_a_large_parameter_that_is_left_alone_is_worth_a_look() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.head = nn.Parameter(torch.randn(64, 3, 3, 3)), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.conv2d(x, self.kernel).relu().mean((2, 3)))

    one = finding(examined(Bare(), channels=False), "prunable")
    assert one.verdict == "look" and "most of them in 'kernel': --include" in one.text
    assert finding(examined(cases.build("residual"), channels=False), "prunable").verdict == "good"
    nothing = examined(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192)), channels=False)
    assert nothing.left_sizes == {"1.weight": 192, "1.bias": 192}
