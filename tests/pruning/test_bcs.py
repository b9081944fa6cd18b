"""BCS-P: counts of the paper's tables, connections that live, die and are replaced, and where replacements go."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harp.errors import BudgetError, RecipeError
from harp.models import build
from harp.pruning import masks as mask_ops
from harp.pruning.allocation import allocate
from harp.pruning.methods.base import Plan
from harp.pruning.methods.bcs import BcsP, start_rates
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural
from support import cases


def big(name: str) -> Weights:
    return Weights(build(name, num_classes=10, shape=(3, 32, 32)))


def step(pruner: BcsP, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x, y = cases.batch(seed=seed)
    optimizer.zero_grad()
    nn.functional.cross_entropy(pruner.units.model(x), y).backward()
    pruner.after_backward()
    assert all(not theta.grad[theta <= 0].any() for theta in pruner.theta), "dormant connections get no gradient"
    optimizer.step()
    pruner.after_step()


def begun(case: str = "conv", lr: float = 0.1, **options: Any) -> tuple[BcsP, torch.optim.Optimizer]:
    model = cases.build(case)
    pruner = BcsP(Weights(model), **{"keep": 0.1, **options})
    optimizer = torch.optim.SGD(pruner.trainable(), lr=lr, momentum=0.9, weight_decay=5e-4)
    pruner.bind(optimizer)
    pruner.start()
    return pruner, optimizer


@pytest.mark.parametrize(("name", "total", "first"), [("vgg16", 15302, 76439), ("resnet18", 11164, None)])
def test_the_papers_totals_and_first_count(name: str, total: int, first: int | None) -> None:
    pruner = BcsP(big(name), keep=0.001)
    assert pruner.total == mask_ops.kept(pruner.masks()) == total
    assert sum(pruner.active()) == (first or sum(pruner.active())) > total
    assert not pruner.ready


def test_the_authors_first_densities() -> None:
    keep, middle = 0.001, 0.0005
    assert start_rates(big("vgg16"), keep) == [0.6, 0.6, 0.2, 0.2, *[middle] * 11, 0.6]
    assert start_rates(big("resnet18"), keep) == [0.6, *[0.2] * 4, *[middle] * 15, 0.6]
    wrapped = Weights(nn.Sequential(nn.Identity(), build("resnet18", num_classes=10, shape=(3, 32, 32))))
    assert start_rates(wrapped, keep) == start_rates(big("resnet18"), keep)


def test_a_stage_that_holds_most_weights_is_not_boosted() -> None:
    layers = nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
    assert start_rates(Weights(layers), 0.1) == [0.05, 0.2, 0.6]


@given(keep=st.floats(0.02, 0.9), case=st.sampled_from(sorted(cases.CASES)), seed=st.integers(0, 2**30))
@settings(max_examples=25, deadline=None)
def test_the_total_is_rounded_down_and_the_start_has_at_least_it(keep: float, case: str, seed: int) -> None:
    units = Weights(cases.build(case))
    pruner = BcsP(units, keep, seed=seed)
    assert pruner.total == int(keep * sum(units.sizes) + 1e-9) in (units.total(keep), units.total(keep) - 1)
    assert sum(pruner.active()) >= pruner.total == mask_ops.kept(pruner.masks())


def test_weights_are_sign_times_theta_and_signs_stay() -> None:
    pruner, optimizer = begun("residual", lr=0.5)
    signs = [pruner.get_buffer(f"sign{i}").clone() for i in range(len(pruner.theta))]
    assert all(set(sign.unique().tolist()) == {-1, 1} for sign in signs)
    for seed in range(5):
        step(pruner, optimizer, seed)
        for i, (theta, weight) in enumerate(zip(pruner.theta, pruner.units.weights, strict=True)):
            assert torch.equal(pruner.get_buffer(f"sign{i}"), signs[i])
            assert torch.equal(weight, signs[i] * theta * (theta > 0))
            assert (theta >= 0).all()


def test_the_count_falls_by_deaths_only_and_is_exact_after_every_rewiring() -> None:
    pruner, optimizer = begun("conv", lr=1.0, keep=0.06, noise=0.1)
    before, reached = sum(pruner.active()), False
    if before == pruner.total:
        pytest.fail("the start should be above the budget")
    for seed in range(30):
        step(pruner, optimizer, seed)
        now = sum(pruner.active())
        assert pruner.total <= now <= before
        assert not reached or now == pruner.total
        assert pruner.ready == (now == pruner.total)
        before, reached = now, reached or now == pruner.total
    assert reached, "noise this large kills enough in thirty steps"


def test_new_connections_have_the_small_value_and_no_momentum() -> None:
    pruner, optimizer = begun("conv", keep=0.3, noise=1.0)
    step(pruner, optimizer)
    old = [weight != 0 for weight in copy.deepcopy(pruner.units.weights)]
    step(pruner, optimizer, 1)
    born = 0
    for theta, was in zip(pruner.theta, old, strict=True):
        new = ~was & (theta > 0)
        born += int(new.sum())
        assert torch.equal(theta[new], torch.full_like(theta[new], 1e-12))
        momentum = optimizer.state[theta]["momentum_buffer"]
        assert not momentum[new].any()
        assert not momentum[theta <= 0].any()
        assert momentum[was & (theta > 1e-12)].any()
    assert born > 0


def test_one_step_equals_that_of_the_paper() -> None:
    pruner, _ = begun("conv", noise=0.0, decay=0.01)
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.2)
    pruner.bind(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05  # a quarter of the first rate, and so is the decay
    theta = [t.detach().clone() for t in pruner.theta]
    twins = [t.clone().requires_grad_() for t in theta]
    model = copy.deepcopy(pruner.units.model)
    x, y = cases.batch()
    torch.manual_seed(0)
    weights = {
        name: torch.where(t > 0, t * pruner.get_buffer(f"sign{i}"), 0.0)
        for i, (name, t) in enumerate(zip(pruner.units.names, twins, strict=True))
    }
    nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y).backward()
    torch.manual_seed(0)
    step(pruner, optimizer)
    for t, first, twin in zip(pruner.theta, theta, twins, strict=True):
        expected = (first - 0.05 * twin.grad) * (1 - 0.01 / 4)
        alive = (first > 0) & (expected > 0)
        torch.testing.assert_close(t[alive], expected[alive])
        assert ((t[~alive] == 0) | (t[~alive] == torch.tensor(1e-12))).all()


def drift(pruner: BcsP, steps: int) -> list[int]:
    """Let connections live and die with no gradient at all."""
    pruner.start()
    for _ in range(steps):
        pruner.after_step()
    return pruner.active()


@pytest.mark.parametrize("strategy", [None, "lamp"])
def test_without_gradients_the_rates_become_those_of_the_replacements(strategy: str | None) -> None:
    torch.manual_seed(3)
    units = Weights(nn.Sequential(nn.Linear(200, 60), nn.Linear(60, 100), nn.Linear(100, 40)))
    counts = allocate("lamp", units, 2200) if strategy else units.sizes
    # Noise kills half of the new connections immediately, and decay all old ones: after a few dozen steps the start
    # does not matter.
    pruner = BcsP(units, keep=0.1, strategy=strategy, noise=1.0, decay=0.2, seed=1)
    counts = drift(pruner, 60)
    assert sum(counts) == pruner.total == 2200
    expected = [pruner.total * count / sum(counts) for count in counts]
    chi_square = sum((a - b) ** 2 / b for a, b in zip(counts, expected, strict=True))
    assert chi_square < 13.8, "0.999 quantile of chi square with two degrees of freedom"
    others = [pruner.total * n / sum(units.sizes) for n in units.sizes] if strategy else [pruner.total / 3] * 3
    assert sum((a - b) ** 2 / b for a, b in zip(counts, others, strict=True)) > 50, "and nothing else"


def test_a_strategy_gives_the_first_counts() -> None:
    units = Weights(cases.build("residual"))
    pruner = BcsP(units, keep=0.1, strategy="lamp")
    assert pruner.active() == allocate("lamp", units, pruner.total)
    assert pruner.ready


def test_replacements_of_full_layers_go_to_others_within_the_limits() -> None:
    units = Weights(cases.build("conv"), maximum={"features.4": 0.02}, minimum={"classifier.3": 0.5})
    pruner = BcsP(units, keep=0.4, noise=1.0, decay=0.1)
    for _ in range(10):
        active = drift(pruner, 2)
        assert sum(active) == pruner.total
        assert active[1] <= units.upper[1] == 23
        for answer in pruner.masks().values():
            assert answer.any()
        assert int(pruner.masks()["classifier.3.weight"].sum()) >= 32


@pytest.mark.parametrize(("minimum", "least"), [({}, 1), ({"2": 0.5}, 10)])
def test_an_empty_layer_gets_replacements_first(minimum: dict[str, float], least: int) -> None:
    """By size alone the last layer would be given one weight in six hundred, and could stay empty for long."""
    layers = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 20), nn.Linear(20, 1))
    for seed in range(5):
        pruner = BcsP(Weights(layers, minimum=minimum), keep=0.1, noise=0.0, seed=seed)
        pruner.start()
        for _ in range(200):  # the start is above the budget: let it fall first
            if pruner.ready:
                break
            with torch.no_grad():
                pruner.theta[1].masked_fill_(pruner.theta[1] < pruner.theta[1].median(), 0.0)
            pruner.after_step()
        with torch.no_grad():
            pruner.theta[2].zero_()
        pruner.after_step()
        assert pruner.active()[2] >= least
        assert sum(pruner.active()) == pruner.total


def test_the_masks_keep_the_largest_theta_while_too_many_are_active() -> None:
    pruner, optimizer = begun("conv", keep=0.02)
    step(pruner, optimizer)
    assert sum(pruner.active()) > pruner.total
    pairs = [(theta.detach(), mask) for theta, mask in zip(pruner.theta, pruner.masks().values(), strict=True)]
    least = min(float(theta[mask].min()) for theta, mask in pairs if int(mask.sum()) > 1)  # one a layer in any case
    assert least >= max(float(theta[~mask].max()) for theta, mask in pairs)


def test_the_weights_are_reset_once() -> None:
    models = [cases.build("transformer", seed=seed) for seed in (0, 1)]
    for model in models:
        pruner = BcsP(Weights(model), keep=0.1)
        state = torch.get_rng_state()
        pruner.start()
        assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if name not in ("token", "position"):
            assert torch.equal(a, b), name
    assert not models[0].encoder.layers[0].self_attn.out_proj.bias.any(), "attention's own initialisation is kept"
    with torch.no_grad():
        models[1].head.bias.fill_(5.0)
    pruner.start(Plan(1, 1, 0.1))
    assert (models[1].head.bias == 5).all()


def test_biases_and_norms_train_under_the_optimisers_decay() -> None:
    pruner, optimizer = begun("conv")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 5e-4]
    before = copy.deepcopy(pruner.units.model.state_dict())
    step(pruner, optimizer)
    for name, parameter in pruner.units.model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert all(weight.grad is None for weight in pruner.units.weights)


def test_a_schedule_reaches_noise_and_decay() -> None:
    model = cases.build("conv")
    pruner = BcsP(Weights(model), keep=0.1, noise=0.0)
    rates: list[float] = []
    fit(
        model,
        [cases.batch(seed=seed) for seed in range(2)],
        Natural(),
        pruner,
        epochs=2,
        lr=0.1,
        schedule=lambda progress: 1 - progress,
        on_step=lambda record: rates.append(pruner.learning_rate() / pruner.first_rate),
    )
    assert rates == pytest.approx([1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("options", [{"noise": -1.0}, {"decay": 1.0}, {"new": 0.0}])
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError):
        BcsP(Weights(cases.build("conv")), keep=0.1, **options)


def test_a_budget_below_one_weight_a_layer_is_refused() -> None:
    units = Weights(cases.build("conv"))
    assert units.total(3.6 / 2456) == 4
    with pytest.raises(BudgetError, match="layers need 4"):
        BcsP(units, keep=3.6 / 2456)
