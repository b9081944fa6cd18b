"""Measured times as a budget: the times of layers are recovered from a clock that depends on their sizes."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.errors import ModelError, RecipeError
from harp.pruning.channels import Channels
from harp.pruning.channels.latency import Latency, Speed, fitted, measure
from support import cases


class Clock:
    """Time that passes in layers only."""

    now = 0.0

    def __call__(self) -> float:
        return Clock.now


MICRO = 1e-6


class Convolution(nn.Conv2d):
    """Takes 2 µs, 10 ns for each pair of channels, and 50 ns for each channel given."""

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += (2 + 0.01 * self.in_channels * self.out_channels + 0.05 * self.out_channels) * MICRO
        return super().forward(x)


class Relu(nn.Module):
    """Takes 1 µs and 20 ns for each channel, in no layer with weights."""

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += (1 + 0.02 * x.shape[1]) * MICRO
        return x.relu()


def network() -> nn.Module:
    layers = [Convolution(3, 64, 1), Relu(), Convolution(64, 80, 1), Relu(), Convolution(80, 96, 1), Relu()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 4))


IMAGES = cases.batch(2)[0]


@pytest.fixture(scope="module")
def units() -> Channels:
    return Channels(network(), IMAGES)


@pytest.fixture(scope="module")
def times(units: Channels) -> Latency:
    return measure(units.model, IMAGES, units.trace, units.spaces, repeats=3, clock=Clock())


def picoseconds(units: Channels, counts: list[int]) -> float:
    """The time that passes in the network that keeps so many channels of each space."""
    gone = torch.cat([torch.arange(size) >= count for size, count in zip(units.sizes, counts, strict=True)])
    net = units.without(gone).applied(units.model).eval()
    start = Clock.now
    with torch.no_grad():
        net(IMAGES[:1])
    return (Clock.now - start) * 1e12


def test_times_of_layers_are_recovered(times: Latency) -> None:
    assert set(times.layers) == {"0", "2", "4", "8"} and times.batch == 1
    speed = times.layers["2"]
    assert speed.fixed == pytest.approx(2e6, rel=0.02)
    assert speed.per_product * 64 == pytest.approx(1e4, rel=0.02)  # 8 x 8 positions
    assert speed.per_result * 64 == pytest.approx(5e4, rel=0.05)
    assert times.rest.fixed == pytest.approx(3e6, rel=0.05)


@pytest.mark.parametrize("counts", [[64, 80, 96], [10, 70, 5], [64, 3, 96], [7, 9, 90], [1, 1, 1]])
def test_predicted_times_are_measured_ones(units: Channels, times: Latency, counts: list[int]) -> None:
    assert units.priced(times).exact(counts) == pytest.approx(picoseconds(units, counts), rel=0.05)


def test_times_are_a_budget(units: Channels, times: Latency) -> None:
    timed = Channels(units.model, IMAGES, budget=times)
    assert timed.noun == "ps" and timed.latency is times
    assert timed.size == units.priced(times).exact(units.sizes)
    total = timed.total(0.5)
    counts = timed.counts([timed.uniform_rate(total)] * 3)
    assert timed.spend(counts) == pytest.approx(total, rel=0.03)
    assert isinstance(timed.size, int) and timed.spend([1, 1, 1]) > 9_000_000  # what no pruning saves


def test_times_can_be_saved(times: Latency) -> None:
    assert Latency.from_dict(json.loads(json.dumps(times.as_dict()))) == times


@pytest.mark.parametrize("content", [{}, {"layers": 1}, {"layers": {}, "rest": {}, "places": {}, "batch": 1}])
def test_data_that_are_no_times_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="no times"):
        Latency.from_dict(content)


def test_times_of_another_network_are_refused(times: Latency) -> None:
    with pytest.raises(ModelError, match="another network"):
        Channels(cases.build("conv"), IMAGES, budget=times)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"repeats": 0}])
def test_wrong_options_are_refused(units: Channels, wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="times of batch"):
        measure(units.model, IMAGES, units.trace, units.spaces, **wrong)


def test_the_budget_latency_is_measured_on_the_spot() -> None:
    model = network().train()
    timed = Channels(model, IMAGES, budget="latency")
    assert timed.latency is not None and timed.size > 0
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RecipeError, match="latency"):
        Channels(model, IMAGES, budget="speed")


@pytest.mark.parametrize("case", ["grouped", "tied", "transformer", "residual"])
def test_all_kinds_of_networks_can_be_timed(case: str) -> None:
    model = cases.build(case)
    units = Channels(model, IMAGES)
    times = measure(model, IMAGES, units.trace, units.spaces, batch=3, repeats=1)
    assert set(times.places) == {use.name for use in units.trace.uses}
    assert all(min(vars(speed).values()) >= 0 for speed in [*times.layers.values(), times.rest])
    if case == "transformer":  # the projection is used by the attention around it, and not called
        assert times.places["encoder.layers.0.self_attn.out_proj.weight"] == "encoder.layers.0.self_attn"
    if case == "tied":
        assert times.places["up.weight"] == "up"
    prices = units.priced(times)
    assert prices.exact(units.sizes) >= prices.exact([1] * len(units.sizes)) > 0


def test_time_inside_a_timed_module_counts_once() -> None:
    class Outer(Convolution):
        def __init__(self) -> None:
            super().__init__(8, 8, 1)
            self.inner = Convolution(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(super().forward(x))

    model = nn.Sequential(Convolution(3, 8, 1), Outer(), Convolution(8, 4, 1), nn.Flatten())
    units = Channels(model, IMAGES)
    times = measure(model, IMAGES, units.trace, units.spaces, repeats=1, clock=Clock())
    work = {
        name: speed.fixed + 64 * 64 * speed.per_product + 8 * 64 * speed.per_result
        for name, speed in times.layers.items()
    }
    assert work["1"] == pytest.approx(work["1.inner"], rel=0.02) == pytest.approx(3.04e6, rel=0.05)


amounts = st.floats(0, 1e3, allow_subnormal=False).map(lambda x: x if x > 1e-2 else 0.0)


@settings(max_examples=60, deadline=None)
@given(amounts, amounts, amounts)
def test_the_fit_finds_what_is_there_and_nothing_negative(fixed: float, product: float, result: float) -> None:
    work = [(width * width * 1000, width * 50) for width in (1, 2, 3, 5, 8, 13)]
    times = [fixed * 1e6 + product * a + result * b * 100 + 10 for a, b in work]
    speed = fitted(work, times)
    assert min(vars(speed).values()) >= 0
    for (a, b), time in zip(work, times, strict=True):
        assert speed.fixed + speed.per_product * a + speed.per_result * b == pytest.approx(time, rel=1e-3)


def test_times_that_grow_with_less_work_are_fitted_by_a_constant() -> None:
    assert fitted([(1, 1), (4, 2), (9, 3)], [30e6, 20e6, 10e6]).per_product == 0
    assert isinstance(fitted([(0, 1), (0, 1)], [5.0, 5.0]), Speed)
