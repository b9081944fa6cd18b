"""R-ADMM: the projection, the dual update, the pull, and none of the defects of the authors' code."""

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harp.errors import RecipeError
from harp.pruning import masks as mask_ops
from harp.pruning.allocation import allocate
from harp.pruning.methods import Admm, Fixed, Plan
from harp.pruning.methods.admm import project
from harp.pruning.schedules import sawtooth
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural
from support import cases
from support.methods import Memory, Three

values = st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6)


@given(values, st.integers(1, 6))
def test_the_projection_is_the_nearest_point_and_stays_where_it_is(entries: list[float], count: int) -> None:
    w = torch.tensor(entries, dtype=torch.float64)
    units = Weights(nn.Linear(3, 2, dtype=torch.float64))
    projected = project(units, [w], [count])[0]
    assert int(projected.count_nonzero()) <= count
    assert torch.equal(project(units, [projected], [count])[0], projected)
    supports = itertools.combinations(range(6), count)
    distances = [sum(float(w[i]) ** 2 for i in range(6) if i not in support) for support in supports]
    assert float((w - projected).square().sum()) == pytest.approx(min(distances), abs=1e-12)


def dyadic(model: nn.Module, seed: int) -> None:
    """Weights that are multiples of 1/64: sums and differences are exact."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-64, 65, parameter.shape, generator=generator) / 64)


def test_the_dual_moves_by_the_distance_to_the_projection_and_rho_grows() -> None:
    model = cases.build("conv")
    dyadic(model, 0)
    pruner = Admm(Weights(model), keep=0.1, period=2)
    layers = range(len(pruner.units.names))
    first = project(pruner.units, pruner.units.weights, pruner.counts)
    for i in layers:
        assert torch.equal(pruner.get_buffer(f"z{i}"), first[i])
        assert not pruner.get_buffer(f"u{i}").any()
    for epoch in range(1, 7):
        dyadic(model, epoch)
        before = [(pruner.get_buffer(f"z{i}").clone(), pruner.get_buffer(f"u{i}").clone()) for i in layers]
        pruner.after_epoch()
        assert pruner.rho == pytest.approx(1e-3 * 1.3 ** (epoch // 2))
        shifted = [weight.detach() + u_old for weight, (_, u_old) in zip(pruner.units.weights, before, strict=True)]
        projected = project(pruner.units, shifted, pruner.counts)
        for i, weight in enumerate(pruner.units.weights):
            (z_old, u_old), z, u = before[i], pruner.get_buffer(f"z{i}"), pruner.get_buffer(f"u{i}")
            if epoch % 2:
                assert torch.equal(z, z_old) and torch.equal(u, u_old)
            else:
                assert torch.equal(z, projected[i])
                assert torch.equal(u - u_old, weight - z)


def test_the_added_gradient_is_that_of_the_augmented_term() -> None:
    model = cases.build("residual").double()
    pruner = Admm(Weights(model), keep=0.1, rho=0.7, period=1)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in pruner.units.weights:
            weight.add_(torch.randn_like(weight))
    pruner.after_epoch()
    for weight in pruner.units.weights:
        weight.data.mul_(1.5)
    x, y = cases.batch()
    model.eval()
    nn.functional.cross_entropy(model(x.double()), y).backward()
    pruner.units.weights[0].grad = None  # as if unused: the pull acts on it all the same
    pruner.after_backward()
    got = [weight.grad.clone() for weight in pruner.units.weights]
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x.double()), y)
    terms = [
        (w - pruner.get_buffer(f"z{i}") + pruner.get_buffer(f"u{i}")).square().sum()
        for i, w in enumerate(pruner.units.weights)
    ]
    task = torch.autograd.grad(loss, pruner.units.weights[0], retain_graph=True)[0]
    (loss + pruner.rho / 2 * sum(terms)).backward()
    pruner.units.weights[0].grad -= task
    for gradient, weight in zip(got, pruner.units.weights, strict=True):
        torch.testing.assert_close(gradient, weight.grad)


def test_frozen_weights_are_left_alone() -> None:
    model = cases.build("conv")
    model.features[0].weight.requires_grad_(False)
    pruner = Admm(Weights(model), keep=0.1)
    pruner.after_backward()
    assert model.features[0].weight.grad is None and model.features[4].weight.grad is not None


@pytest.mark.parametrize("growth", [1.0, 1.3])
def test_weights_and_sparse_copy_meet_on_a_quadratic(growth: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 10, bias=False)
    goal = torch.randn(10, 20)
    pruner = Admm(Weights(model), keep=0.2, rho=2.0, rho_growth=growth, period=1)
    first = pruner.masks()["weight"]
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.1)
    pruner.start()
    residuals = []
    for _ in range(30):
        for _ in range(20):
            optimizer.zero_grad()
            (0.5 * (model.weight - goal).square().sum()).backward()
            pruner.after_backward()
            optimizer.step()
            pruner.after_step()
        residuals.append(pruner.metrics()["residual"])
        pruner.after_epoch()
        optimizer.param_groups[0]["lr"] = 0.4 / (1 + pruner.rho)
    assert residuals[-1] < 0.01 * residuals[0]
    assert residuals[10] < residuals[0]
    answer = pruner.finish()["weight"]
    if growth == 1:  # where the two meet, the loss is flat along the kept weights; a growing rho stops before that
        torch.testing.assert_close(model.weight[answer], goal[answer], rtol=0, atol=0.02)
    best = goal[mask_ops.top_k(goal.abs(), 40)].square().sum()
    assert goal[answer].square().sum() > 0.9 * best > 1.5 * goal[first].square().sum()


@pytest.mark.parametrize(("n", "sparsity", "kept"), [(101, 0.99, 1), (2001, 0.9, 200)])
def test_counts_are_exact_where_a_percentile_is_one_off(n: int, sparsity: float, kept: int) -> None:
    model = nn.Linear(n, 1, bias=False)
    pruner = Admm(Weights(model), keep=1 - sparsity)
    assert int(pruner.get_buffer("z0").count_nonzero()) == kept
    answer = pruner.finish()["weight"]
    assert int(answer.sum()) == int(model.weight.count_nonzero()) == pruner.total == kept
    assert torch.equal(model.weight != 0, answer), "no weight survives outside its mask"


@pytest.mark.parametrize("strategy", ["uniform", "erk", "lamp", "igq", "global"])
def test_counts_are_the_strategys_at_construction(strategy: str) -> None:
    model = cases.build("conv")
    units = Weights(model)
    expected = allocate(strategy, units, units.total(0.1))
    pruner = Admm(units, keep=0.1, strategy=strategy)
    with torch.no_grad():
        units.weights[0].mul_(100)  # rates that are read off the weights do not follow them
    assert [int(mask.sum()) for mask in pruner.masks().values()] == expected
    given_rates = dict(zip(units.names, [0.5, 0.1, 0.1, 0.1], strict=True))
    assert Admm(units, keep=0.1, strategy=given_rates).counts == allocate(given_rates, units, units.total(0.1))


def test_all_weights_train_dense_except_within_exact() -> None:
    model = cases.build("conv")
    pruner = Admm(Weights(model), keep=0.1)
    seen = []

    def validate() -> dict[str, float]:
        seen.append(sum(int(weight.count_nonzero()) for weight in pruner.units.weights))
        return {}

    dense = []

    def on_step(record: Any) -> None:
        dense.append(sum(int(weight.count_nonzero()) for weight in pruner.units.weights))
        assert record["residual"] > 0 and record["rho"] >= 1e-3

    fit(model, Three(), Natural(), pruner, epochs=2, lr=0.05, validate=validate, on_step=on_step)
    assert seen == [pruner.total] * 2
    assert dense == [sum(pruner.units.sizes)] * 6


def test_fine_tuning_keeps_zeros_exactly_zero() -> None:
    model = cases.build("conv")
    answer = fit(model, Three(), Natural(), Admm(Weights(model), keep=0.1), epochs=2, lr=0.05).masks
    before = copy.deepcopy(model.state_dict())
    fit(model, Three(), Natural(), Fixed(Weights(model), answer), epochs=2, lr=0.05)
    for name, mask in answer.items():
        weight = model.get_parameter(name)
        assert not weight[~mask].any()
        assert not torch.equal(weight[mask], before[name][mask])


@pytest.mark.parametrize("period", [None, 2])
@pytest.mark.parametrize("stop_after", [7, 10, 12])
def test_resumed_in_the_middle_of_a_period(period: int | None, stop_after: int) -> None:
    def train(keeper: Memory) -> Admm:
        model = cases.build("residual")
        pruner = Admm(Weights(model), keep=0.1, strategy="lamp", rho=0.1, period=period)
        fit(model, Three(), Natural(), pruner, epochs=5, lr=0.05, keeper=keeper)
        return pruner

    expected, keeper = train(Memory()), Memory(stop_after)
    with pytest.raises(InterruptedError):
        train(keeper)
    resumed = train(Memory(state=keeper.state))
    assert resumed.rho == expected.rho > 0.1 and resumed.epoch == expected.epoch == 5
    assert any(expected.get_buffer("u0").reshape(-1).tolist())
    for name, value in expected.named_buffers():
        assert torch.equal(resumed.get_buffer(name), value), name
    for one, other in zip(resumed.units.weights, expected.units.weights, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("epochs", "period"), [(200, 20), (100, 10), (19, 1), (3, 1)])
def test_the_period_is_a_tenth_of_the_training(epochs: int, period: int) -> None:
    pruner = Admm(Weights(cases.build("conv")), keep=0.1)
    pruner.start(Plan(epochs, 10, lr=0.1))
    assert pruner.period == period
    pruner.start(Plan(7 * epochs, 10, lr=0.1))
    assert pruner.period == period, "a resumed training keeps its pace"
    chosen = Admm(Weights(cases.build("conv")), keep=0.1, period=30)
    chosen.start(Plan(epochs, 10, lr=0.1))
    assert chosen.period == 30


def test_without_a_plan_the_period_is_the_authors() -> None:
    pruner = Admm(Weights(cases.build("conv")), keep=0.1)
    pruner.start()
    rhos = []
    for _ in range(21):
        pruner.after_epoch()
        rhos.append(pruner.rho)
    assert rhos[18] == 1e-3 and rhos[19] == rhos[20] == pytest.approx(1.3e-3)


@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(0, 199))
def test_the_sawtooth_restarts_at_each_update(tenth: int, epoch: int) -> None:
    """At thirds that are whole epochs: lr · 0.1^floor((e mod T) / (T / 3)), looked at in the middle of the epoch."""
    period, epochs = 3 * tenth, 30 * tenth
    epoch %= epochs
    factor = sawtooth()((epoch + 0.5) / epochs)
    assert factor == pytest.approx(0.1 ** ((epoch % period) // tenth))


@pytest.mark.parametrize("options", [{"rho": 0.0}, {"rho": float("nan")}, {"rho_growth": 0.9}, {"period": 0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(options))):
        Admm(Weights(cases.build("conv")), keep=0.1, **options)
