"""HARP by default: the budget holds at every step, nothing runs away, and the answer is a network in one piece."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harp.pruning.allocation import allocate
from harp.pruning.connectivity import Paths
from harp.pruning.masks import kept
from harp.pruning.methods import PRUNERS, Harp, Plan, Tandem
from harp.pruning.methods.base import largest
from harp.pruning.units import Units, Weights
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases
from support.kinds import make
from support.methods import Memory, Three, assert_same_state, train

LEARNERS = [Harp, Tandem]


def soft_cost(pruner: Harp) -> float:
    return float(pruner.units.cost(pruner.rates().detach()))


@settings(max_examples=15, deadline=None)
@given(
    keep=st.floats(0.004, 0.9),
    steps=st.integers(2, 12),
    noise=st.floats(0, 4),
    kind=st.sampled_from(["weights", "channels", "filters", "macs"]),
)
def test_the_budget_is_met_at_every_step_whatever_the_quotas_do(
    keep: float, steps: int, noise: float, kind: str
) -> None:
    units: Units = Weights(cases.build("conv")) if kind == "weights" else make(kind)
    if units.kind == "channels":
        keep = max(keep, 0.3)
    pruner = Harp(units, keep=keep)
    pruner.start(Plan(1, steps, lr=0.1))
    first = soft_cost(pruner)
    most = min(8 * pruner.total, units.spend(units.upper))
    assert first == pytest.approx(most, rel=0.02)
    spent = [first]
    for step in range(steps):
        with torch.no_grad():
            pruner.quotas += noise * torch.randn(len(pruner.quotas), generator=torch.Generator().manual_seed(step))
        pruner.after_step()
        spent.append(soft_cost(pruner))
        assert units.spent(pruner.masks()) <= pruner.total
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(spent))
    half = spent[(steps + 1) // 2 :]
    assert half == pytest.approx([pruner.total] * len(half), rel=1e-6)
    pruner.after_epoch()
    assert pruner.ready


def test_without_a_plan_the_budget_is_met_from_the_start() -> None:
    pruner = Harp(Weights(cases.build("conv")), keep=0.02)
    pruner.start()
    assert soft_cost(pruner) == pytest.approx(pruner.total, rel=1e-6)


@pytest.mark.parametrize("keep", [0.0005, 0.005, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("steps", [50, 50_000])
def test_the_budget_falls_in_even_factors_at_any_length(keep: float, steps: int) -> None:
    units = Weights(nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 100)))
    pruner = Harp(units, keep=keep)
    pruner.length = steps
    factors = []
    for done in (0, steps / 4, steps / 2, steps):
        pruner.done = done
        pruner.follow_budget()
        factors.append(soft_cost(pruner) / pruner.total)
    most = min(8.0, units.size / pruner.total)
    assert factors == pytest.approx([most, most**0.5, 1.0, 1.0], rel=0.01)


def test_a_dead_filter_does_not_move_the_quotas() -> None:
    """What a norm of variance 0 makes of a pruned filter's gradient is not what more weights would be worth."""
    pruner = Harp(Weights(cases.build("conv")), keep=0.1)
    pruner.trainable()
    pruner.start()
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(weight.shape, generator=generator) for weight in pruner.units.weights]
    wild = [gradient.clone() for gradient in plain]
    layer = pruner.kept[1]
    layer[3] = False  # a filter with nothing left
    wild[1][3] = 1e6
    worth = [pruner.worth(gradients) for gradients in (plain, wild)]
    assert torch.equal(*worth)
    wild[1][4][~layer[4]] = 1e6  # of a living one it is
    assert layer[4].any() and not torch.equal(worth[0], pruner.worth(wild))


def test_a_kept_weight_does_not_move_the_quotas() -> None:
    pruner = Harp(Weights(cases.build("conv")), keep=0.1)
    pruner.trainable()
    pruner.start()
    gradients = [torch.where(kept, 1e6, -2.0) for kept in pruner.kept]
    assert pruner.worth(gradients).tolist() == pytest.approx([2.0] * 4), "the mean over pruned weights, turned"
    gradients[2] = None
    assert pruner.worth(gradients).tolist() == pytest.approx([2.0, 2.0, 0.0, 2.0])
    pruner.kept[0].fill_(True)
    assert float(pruner.worth(gradients)[0]) == 0, "a full layer can't keep more"


@pytest.mark.parametrize("steps", [10, 60])
def test_no_quota_moves_further_than_its_reach_whatever_the_gradients(steps: int) -> None:
    pruner = Harp(Weights(cases.build("conv")), keep=0.1, reach=1.5)
    pruner.trainable()
    pruner.start(Plan(1, steps, lr=0.1))
    first, path = pruner.quotas.detach().clone(), 0.0
    for step in range(steps + 20):  # and stands still should the training be longer than planned
        before = pruner.quotas.detach().clone()
        pruner.pull([torch.full(score.shape, -(1.5**step)) for score in pruner.scores])
        pruner.after_step()
        path += float((pruner.quotas.detach() - before).max())
        assert step < steps or torch.equal(before, pruner.quotas.detach())
    assert path == pytest.approx(1.5, rel=1.1 / steps), "gradients that grow use the whole of it"
    assert float((pruner.quotas.detach() - first).abs().max()) <= 1.5 * (1 + 1 / steps) + 1e-5


@pytest.mark.parametrize("name", ["harp", "harp-r", "tandem"])
@pytest.mark.parametrize("stop_after", [4, 11, 17])  # while the budget falls; after a look at the ways; at the target
def test_a_resumed_training_is_the_uninterrupted_one(name: str, stop_after: int) -> None:
    def trained(keeper: Memory) -> tuple[list[Any], Harp]:
        model = cases.build("conv")
        pruner = PRUNERS[name](Weights(model, example=cases.batch()[0]), keep=0.02)
        fitted = fit(model, Three(), PgdTraining(steps=1), pruner, epochs=8, lr=0.1, keeper=keeper)
        return [(record["rate"], record["loss"]) for record in fitted.history], pruner

    expected, pruner = trained(Memory())
    assert all(not pruner.get_buffer(f"open{i}").all() for i in (1, 2)), "there are weights without a way"
    keeper = Memory(stop_after)
    with pytest.raises(InterruptedError):
        trained(keeper)
    result, resumed = trained(Memory(state=keeper.state))
    assert result == expected
    assert_same_state(resumed, pruner)


def test_an_extreme_gradient_moves_a_quota_by_a_bounded_step() -> None:
    pruner = Harp(Weights(cases.build("conv")), keep=0.1, reach=3.0)
    pruner.trainable()
    pruner.start(Plan(1, 100, lr=0.1))
    for size in (1.0, 1e8, 1e25, 3e38, float("inf"), float("nan")):
        before = pruner.quotas.detach().clone()
        pruner.pull([torch.full(score.shape, -size) for score in pruner.scores])
        assert bool(((pruner.quotas - before).abs() <= 3.0 * 2 / 100 + 1e-6).all())
        assert bool(torch.isfinite(pruner.spread).all()), "or no quota would ever move again"
        for score in pruner.scores:
            assert bool(torch.isfinite(score.grad).all())
            assert float(score.grad.norm()) <= float(score.detach().norm()) * (1 + 1e-4)
    halves = [torch.linspace(-1, 1, score.numel()).sign().view(score.shape) * 3e38 for score in pruner.scores]
    assert bool(torch.isfinite(pruner.worth(halves)).all()), "sums of infinities of both signs"


def test_layers_whose_pruned_weights_would_lower_the_loss_gain() -> None:
    for steps in (40, 400):
        pruner = Harp(Weights(cases.build("conv")), keep=0.1, start=1.0, reach=1.5)
        pruner.trainable()
        pruner.start(Plan(1, steps, lr=0.1))
        quotas, rates = pruner.quotas.detach().clone(), pruner.rates().detach()
        for _ in range(steps):
            pruner.pull([torch.full(s.shape, -1.0 if n == 1 else 1.0) for n, s in enumerate(pruner.scores)])
            pruner.after_step()
        assert (pruner.rates().detach() > rates).tolist() == [False, True, False, False]
        assert float((pruner.quotas.detach() - quotas)[1]) == pytest.approx(1.5, rel=0.05), "at any length"


@pytest.mark.parametrize("method", LEARNERS)
def test_every_kept_weight_is_on_a_path(method: Any) -> None:
    model = cases.build("conv")
    x, _ = cases.batch()
    pruner = method(Weights(model, example=x), keep=0.02)
    fit(model, Three(), PgdTraining(steps=1), pruner, epochs=2, lr=0.1)
    answer = pruner.masks()
    assert kept(answer) == pruner.total
    paths = Paths(model, x)
    plain = largest(pruner.units, pruner.strengths(), [int(mask.sum()) for mask in answer.values()])
    assert kept(paths.useful(answer)) > kept(paths.useful(plain)), "the strongest alone waste some"


def test_a_network_that_can_not_run_on_the_example_is_pruned_without_paths(caplog: pytest.LogCaptureFixture) -> None:
    model = cases.build("conv")
    pruner = Harp(Weights(model, example=torch.rand(1, 5, 8, 8)), keep=0.05)
    with caplog.at_level("INFO", "harp"):
        fitted = fit(model, [cases.batch()], Natural(), pruner, epochs=3)
    assert caplog.text.count("without regard to the paths through the network") == 1
    assert kept(fitted.masks) == pruner.total


def test_an_example_is_taken_from_the_first_batch() -> None:
    model = cases.build("conv")
    pruner = Harp(Weights(model), keep=0.02)
    assert pruner.example is None
    fit(model, Three(), Natural(), pruner, epochs=1)
    assert pruner.example is not None and pruner.example.shape == (1, 3, 8, 8)


def test_rates_far_above_the_budget_are_replaced_by_those_of_lamp() -> None:
    model = cases.build("conv")
    units = Weights(model)
    expected = allocate("lamp", units, units.total(0.02))
    pruner = Harp(units, keep=0.02, published=True, gamma_step=1e-6)
    with torch.no_grad():
        pruner.quotas.copy_(torch.tensor([-6.0, 9.0, -6.0, -6.0]))  # a runaway: nearly all in one layer
    answer = [int(mask.sum()) for mask in pruner.masks().values()]
    assert answer == expected
    fit(model, Three(), Natural(), pruner, epochs=1, lr=0.01)
    assert not pruner.ready and [int(mask.sum()) for mask in pruner.masks().values()] == expected


def test_without_reach_the_rates_stay_those_of_the_strategy() -> None:
    model = cases.build("residual")
    units = Weights(model)
    expected = np.array(allocate("blend", units, units.total(0.1)))
    pruner = Tandem(units, 0.1, reach=0.0)
    train(model, pruner, 6)
    counts = np.array([int(mask.sum()) for mask in pruner.masks().values()])
    assert np.abs(counts - expected).max() <= 1 + 0.02 * expected.max()


@pytest.mark.parametrize("name", ["harp", "tandem", "harp-r"])
def test_a_very_deep_network_stays_finite(name: str) -> None:
    """Twelve narrow layers with norms at one weight in two hundred: gradients behind dead filters are huge."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(12):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    pruner = PRUNERS[name](Weights(model), keep=0.005)
    fitted = fit(model, Three(), PgdTraining(steps=1), pruner, epochs=4, lr=0.1)
    assert all(bool(torch.isfinite(score).all()) for score in pruner.scores)
    assert [record["ready"] for record in fitted.history] == [False, True, True, True]
