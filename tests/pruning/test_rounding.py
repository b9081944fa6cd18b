"""Rounding under any cost: within the budget, maximal, within limits, whole steps, deterministic."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harp.errors import BudgetError
from harp.pruning import allocation
from harp.pruning.channels import Channels
from harp.pruning.rounding import highest, nearest, scale_to
from harp.pruning.units import Weights, checked_total, exact
from support import cases
from support.kinds import check, following


class Priced:
    """Units of any sizes, steps and limits under a bilinear cost of random prices."""

    kind, noun, fans = "channels", "ns", [4] * 9

    def __init__(self, sizes: Sequence[int], steps: Sequence[int], limits: Sequence[float], seed: int) -> None:
        generator = np.random.default_rng(seed)
        layers = len(sizes)
        self.sizes, self.names, self.masked = list(sizes), [f"layer{i}" for i in range(layers)], ["one"]
        self.steps, self.fans = list(steps[:layers]), self.fans[:layers]
        self.lower = [max(1, int(share * n)) for share, n in zip(limits, sizes, strict=False)]
        highest_of = zip(self.sizes, self.steps, self.lower, limits[::-1], strict=False)
        self.upper = [n if n < 2 * step else max(-(-low // step) * step, int(n * (1 - share / 2))) for
                      n, step, low, share in highest_of]  # fmt: skip
        self.upper = [min(high, n) for high, n in zip(self.upper, self.sizes, strict=True)]
        self.singles = generator.integers(1, 50, layers).astype(float)
        self.pairs = np.triu(generator.integers(0, 5, (layers, layers)), 1).astype(float)
        self.values = [torch.from_numpy(generator.exponential(1.0, n)) for n in sizes]
        self.size = self.spend(self.sizes)

    @property
    def weights(self) -> list[Any]:
        return self.values

    def strength(self, values: Sequence[torch.Tensor], order: int) -> list[torch.Tensor]:
        return list(values)

    def spend(self, counts: Sequence[int]) -> int:
        kept = np.array(counts, dtype=float)
        return int(self.singles @ kept + kept @ self.pairs @ kept)

    def slope(self, rates: Any) -> tuple[float, Any]:
        kept = rates * np.array(self.sizes)
        gradient = (self.singles + (self.pairs + self.pairs.T) @ kept) * np.array(self.sizes)
        return float(self.singles @ kept + kept @ self.pairs @ kept), gradient

    def uniform_rate(self, total: int) -> float:
        rates = np.linspace(0, 1, 101)
        return float(next((r for r in rates if self.slope(np.full(len(self.sizes), r))[0] >= total), 1.0))


@st.composite
def priced(draw: st.DrawFn) -> Priced:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    steps = draw(st.lists(st.sampled_from([1, 1, 4, 8]), min_size=5, max_size=5))
    limits = draw(st.lists(st.floats(0, 0.4), min_size=5, max_size=5))
    return Priced(sizes, steps, limits, draw(st.integers(0, 999)))


@settings(max_examples=120, deadline=None)
@given(units=priced(), share=st.floats(0, 1), strategy=st.sampled_from([*allocation.STRATEGIES, "given"]))
def test_every_strategy_under_any_cost(units: Priced, share: float, strategy: str) -> None:
    smallest = [
        min(-(-low // step) * step, n) for low, step, n in zip(units.lower, units.steps, units.sizes, strict=True)
    ]
    least, most = units.spend(smallest), units.spend(units.upper)
    total = int(least + share * (most - least))
    rates: Any = {name: 0.1 + 0.1 * i for i, name in enumerate(units.names)} if strategy == "given" else strategy
    counts = allocation.allocate(rates, units, total)
    check(units, counts, total)
    assert allocation.allocate(rates, units, total) == counts
    if share == 1:
        assert all(following(units, layer, count) is None for layer, count in enumerate(counts))


@settings(max_examples=60, deadline=None)
@given(units=priced(), data=st.data())
def test_desired_counts_that_cost_just_the_budget_are_kept(units: Priced, data: st.DataObject) -> None:
    desired = []
    for layer, low in enumerate(units.lower):
        possible = [c for c in range(low, units.upper[layer] + 1)
                    if c % units.steps[layer] == 0 or c == units.sizes[layer]]  # fmt: skip
        desired.append(data.draw(st.sampled_from(possible)))
    counts = nearest(desired, units, units.spend(desired))
    check(units, counts, units.spend(desired))
    assert all(a >= b for a, b in zip(counts, desired, strict=True)) and units.spend(counts) == units.spend(desired)


def test_equal_rates_stay_equal_and_remainders_decide() -> None:
    units = Priced([100, 100, 100], [1, 1, 1, 1, 1], [0.0] * 5, 0)
    units.upper, units.pairs, units.singles = [100] * 3, np.zeros((3, 3)), np.array([7.0, 3.0, 1.0])
    assert nearest([50, 50, 50], units, 11 * 40) == [40, 40, 40]
    assert nearest([50, 50, 50], units, 11 * 40 + 4) == [40, 41, 41]
    assert nearest([50, 50, 50], units, 11 * 40 + 2) == [40, 40, 42]  # the expensive ones don't fit
    assert nearest([0, 0, 1], units, 7 + 3 + 90) == [1, 1, 90]  # no layer gets less than the least
    assert nearest([0, 0, 1], units, 7 + 3 + 100 + 12) == [2, 2, 100]  # full layers leave the rest to the others


def test_thresholds_are_global_and_the_best_come_first() -> None:
    units = Priced([4, 4], [1, 1], [0.0] * 5, 0)
    units.upper, units.pairs, units.singles = [4, 4], np.zeros((2, 2)), np.array([10.0, 1.0])
    scores = [np.array([0.9, 0.8, 0.1, 0.05]), np.array([0.7, 0.6, 0.5, 0.4])]
    assert highest(scores, units, 24) == [2, 4]
    assert highest(scores, units, 21) == [2, 1]
    assert highest(scores, units, 19) == [1, 4]  # the second of the expensive layer does not fit: the cheap ones do
    assert highest(scores, units, 44) == [4, 4]
    ties = [np.full(4, 0.5), np.full(4, 0.5)]
    assert highest(ties, units, 23) == [2, 3]  # of equal scores the first layer's


def test_the_last_step_goes_to_the_most_urgent_not_to_the_first() -> None:
    units = Priced([100, 100, 100], [1, 1, 1], [0.0] * 5, 0)
    units.upper, units.pairs, units.singles = [100] * 3, np.zeros((3, 3)), np.array([7.0, 1.0, 1.0])
    # The factor stops at 0.81, where the expensive layer would take its next step; the others want 40.18 and 40.42.
    assert nearest([50, 49.6, 49.9], units, 9 * 40 + 1) == [40, 40, 41]
    assert nearest([50, 49.9, 49.6], units, 9 * 40 + 1) == [40, 41, 40]
    units.sizes, units.upper = [3] * 3, [3] * 3
    costly, low, high = np.array([0.9, 0.8, 0.1]), np.array([0.7, 0.2, 0.1]), np.array([0.6, 0.3, 0.1])
    assert highest([costly, low, high], units, 9 + 1) == [1, 1, 2]
    assert highest([costly, high, low], units, 9 + 1) == [1, 2, 1]


def test_scaled_counts_cost_the_total_to_the_digit() -> None:
    units = cases.Filters(cases.build("conv"))
    for keep in (0.1, 0.3, 0.8):
        total = units.total(keep)
        counts = scale_to([5.0, 3.0, 2.0], units, total)
        assert units.slope(counts / np.array(units.sizes))[0] == pytest.approx(total, rel=1e-9)
        inside = (counts > 1) & (counts < np.array(units.sizes))
        assert len(set(np.round((counts / np.array([5.0, 3.0, 2.0]))[inside], 9))) <= 1


def test_steps_are_kept_up_to_the_whole_layer() -> None:
    units = cases.Filters(cases.build("conv"), steps=(3, 8, 5))
    assert not exact(units)
    for keep in np.linspace(units.spend([3, 8, 5]) / units.size + 1e-3, 1.0, 30):
        for strategy in allocation.STRATEGIES:
            check(units, allocation.allocate(strategy, units, units.total(keep)), units.total(keep))
    assert allocation.uniform(units, units.total(1.0)) == [8, 16, 16]


def test_erdos_renyi_rates_of_channels_follow_size_and_fan_in() -> None:
    units = Channels(cases.build("conv"), cases.batch()[0])
    desired = [(8 + 72) / 72, (16 + 64) / 64, (16 + 16) / 16]
    total = units.total(0.1)
    assert allocation.erk(units, total) == nearest(desired, units, total) != nearest(units.sizes, units, total)
    proportions = allocation.PROPORTIONS["erk"](units, total)
    assert [count / proportions[0] for count in proportions] == pytest.approx([count / desired[0] for count in desired])


def test_totals_outside_the_limits_are_refused() -> None:
    units = cases.Filters(cases.build("conv"))
    for total in (units.spend([1, 1, 1]) - 1, units.size + 1):
        with pytest.raises(BudgetError, match="outside the layers' limits"):
            nearest([1, 1, 1], units, total)
    with pytest.raises(BudgetError, match="at least"):
        checked_total(units, 0.001)
    units.steps, units.upper = [3, 1, 1], [2, 16, 16]
    with pytest.raises(BudgetError, match="'first' can't keep a multiple of 3 between 1 and 2"):
        nearest([1, 1, 1], units, units.total(0.2))


@pytest.mark.parametrize("strategy", sorted(allocation.STRATEGIES))
@pytest.mark.parametrize("case", ["conv", "residual", "transformer", "grouped", "tied"])
def test_a_budget_of_macs_is_met_from_below_and_to_the_last_weight(case: str, strategy: str) -> None:
    units = Weights(cases.build(case), budget="macs", example=cases.batch()[0])
    for keep in (0.02, 0.1, 0.5, 1.0):
        total = units.total(keep)
        counts = allocation.allocate(strategy, units, total)
        check(units, counts, total)
        assert total - units.spend(counts) < max(units.prices)


def test_one_price_for_all_gives_what_counting_gives() -> None:
    model = nn.Sequential(nn.Linear(12, 30, bias=False), nn.ReLU(), nn.Linear(30, 7, bias=False))
    torch.manual_seed(1)
    plain, priced = Weights(model), Weights(model, budget="macs", example=torch.rand(2, 12))
    assert priced.prices == [1, 1] and exact(plain) and not exact(priced)
    for keep in (0.05, 0.21, 0.5, 0.9):
        for strategy in allocation.STRATEGIES:
            counts = allocation.allocate(strategy, priced, priced.total(keep))
            expected = allocation.allocate(strategy, plain, plain.total(keep))
            assert sum(counts) == sum(expected)
            assert max(abs(a - b) for a, b in zip(counts, expected, strict=True)) <= 1
