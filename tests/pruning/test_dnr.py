"""DNR: what drops, what regrows and where, and that the budget holds after every epoch."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.errors import BudgetError, RecipeError
from harp.pruning import masks as mask_ops
from harp.pruning.methods import Dnr, Plan
from harp.pruning.methods.dnr import spread
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases
from support.methods import Memory, Three


def stack(widths: list[int], seed: int = 0) -> nn.Module:
    """Linear layers between these widths."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def bound(pruner: Dnr, seed: int = 0, scale: Callable[[int], float] = lambda i: 1.0) -> torch.optim.Optimizer:
    """Bind an optimiser whose momentum is drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.1, momentum=0.9)
    for i, weight in enumerate(pruner.units.weights):
        drawn = torch.randn(weight.shape, generator=generator)
        optimizer.state[weight]["momentum_buffer"] = scale(i) * drawn
    pruner.bind(optimizer)
    return optimizer


def slow_drop(weight: Tensor, mask: Tensor, rate: float, low: int) -> set[int]:
    """The positions that are left, one by one."""
    flat, alive = weight.reshape(-1), [i for i, on in enumerate(mask.reshape(-1).tolist()) if on]
    alive.sort(key=lambda i: -abs(float(flat[i])))
    return set(alive[: max(low, len(alive) - math.ceil(rate * len(alive)))])


def water_filled(amount: float, shares: list[float], room: list[int]) -> list[float]:
    """Real numbers in proportion to shares, clipped to the rooms, that sum to the amount: by bisection."""
    low, high = 0.0, amount / min(shares)
    for _ in range(200):
        middle = (low + high) / 2
        filled = [min(middle * share, limit) for share, limit in zip(shares, room, strict=True)]
        low, high = (middle, high) if sum(filled) < amount else (low, middle)
    return filled


widths = st.lists(st.integers(1, 9), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(widths, st.floats(0.05, 1), st.floats(0, 0.99), st.integers(0, 5), st.booleans())
def test_the_global_count_is_exact_after_each_epoch(
    shape: list[int], keep: float, rate: float, seed: int, limited: bool
) -> None:
    model = stack(shape, seed)
    limits = {"minimum": {"0": 0.3}, "maximum": {"0": 0.8}} if limited else {}
    try:
        units = Weights(model, **limits)
        pruner = Dnr(units, keep=keep, prune_rate=rate, seed=seed)
    except BudgetError:
        return  # no such budget
    bound(pruner, seed, lambda i: 10.0**i)
    pruner.start()
    for epoch in range(4):
        with torch.no_grad():  # as training would, so that no two weights are equal
            for weight, mask in zip(units.weights, pruner.masks().values(), strict=True):
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(epoch)) * mask)
        pruner.after_epoch()
        answer = pruner.masks()
        assert mask_ops.kept(answer) == pruner.total == units.total(keep)
        for mask, weight, low, high in zip(answer.values(), units.weights, units.lower, units.upper, strict=True):
            assert 1 <= low <= int(mask.sum()) <= high
            assert not weight[~mask].any()


def test_dropped_and_regrown_weights_are_those_of_the_paper() -> None:
    model = cases.build("conv")
    pruner = Dnr(Weights(model), keep=0.3, prune_rate=0.4, seed=1)
    optimizer = bound(pruner)
    pruner.start()
    for _ in range(3):
        old = {name: mask.clone() for name, mask in pruner.masks().items()}
        before = [weight.detach().clone() for weight in pruner.units.weights]
        momenta = [optimizer.state[w]["momentum_buffer"].clone() for w in pruner.units.weights]
        pruner.after_epoch()
        means = [float(m[old[name]].abs().mean()) for name, m in zip(old, momenta, strict=True)]
        left = [slow_drop(w, old[n], 0.4, 1) for n, w in zip(old, before, strict=True)]
        removed = pruner.total - sum(map(len, left))
        room = [99 * (n - len(rest)) // 100 for n, rest in zip(pruner.units.sizes, left, strict=True)]
        expected = water_filled(removed, means, room)
        for i, (name, mask) in enumerate(pruner.masks().items()):
            now = set(mask.reshape(-1).nonzero().reshape(-1).tolist())
            weight, momentum = pruner.units.weights[i].detach().reshape(-1), momenta[i].reshape(-1)
            assert left[i] <= now, name
            grown = now - left[i]
            assert abs(len(grown) - expected[i]) < 1, "the layer's share of the momentum"
            free = sorted(set(range(weight.numel())) - left[i], key=lambda j: -abs(float(momentum[j])))
            assert grown == set(free[: len(grown)]), "the largest momentum among the free positions"
            assert not weight[list(grown)].any(), "regrown weights start from zero"
            assert torch.equal(weight[list(left[i])], before[i].reshape(-1)[list(left[i])])
        with torch.no_grad():
            for weight, mask in zip(pruner.units.weights, pruner.masks().values(), strict=True):
                weight.add_(0.1 * torch.randn_like(weight) * mask)


def test_the_optimiser_forgets_nothing() -> None:
    pruner = Dnr(Weights(cases.build("conv")), keep=0.2)
    optimizer = bound(pruner)
    before = copy.deepcopy(list(optimizer.state.values()))
    pruner.start()
    pruner.after_epoch()
    for old, new in zip(before, optimizer.state.values(), strict=True):
        assert torch.equal(old["momentum_buffer"], new["momentum_buffer"])


def test_momentum_moves_weights_between_layers_within_their_limits() -> None:
    units = Weights(stack([10, 20, 20]), maximum={"1": 0.25})
    pruner = Dnr(units, keep=0.2, prune_rate=0.5)
    assert [int(mask.sum()) for mask in pruner.masks().values()] == [40, 80]
    bound(pruner, scale=lambda i: 1e6**i)
    pruner.start()
    for _ in range(3):
        pruner.after_epoch()
        assert [int(mask.sum()) for mask in pruner.masks().values()] == [20, 100]


def test_without_momentum_each_layer_gets_back_what_it_lost() -> None:
    pruner = Dnr(Weights(cases.build("conv")), keep=0.1)
    before = [int(mask.sum()) for mask in pruner.masks().values()]
    pruner.start()
    pruner.after_epoch()
    assert [int(mask.sum()) for mask in pruner.masks().values()] == before


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 500)), min_size=1, max_size=8), st.floats(0, 1))
def test_spread_is_exact_and_within_the_rooms(layers: list[tuple[float, int]], part: float) -> None:
    shares, room = [s for s, _ in layers], [r for _, r in layers]
    amount = int(part * sum(room))
    given = spread(amount, shares, room)
    assert sum(given) == amount
    assert all(0 <= count <= limit for count, limit in zip(given, room, strict=True))
    if all(amount <= limit for limit in room) and sum(shares) > 0:
        for count, share in zip(given, shares, strict=True):
            assert abs(count - amount * share / sum(shares)) < len(shares)


def test_spread_gives_the_excess_to_the_others_by_their_shares() -> None:
    assert spread(10, [5.0, 3.0, 2.0], [100, 100, 100]) == [5, 3, 2]
    assert spread(100, [8.0, 1.0, 1.0], [20, 100, 100]) == [20, 40, 40]
    assert spread(100, [8.0, 3.0, 1.0], [20, 100, 100]) == [20, 60, 20]
    assert spread(3, [0.6, 0.4], [9, 9]) == [2, 1]
    assert spread(5, [0.0, 0.0], [9, 1]) == [4, 1]
    assert spread(4, [1.0, 0.0], [2, 9]) == [2, 2]
    assert spread(0, [1.0], [0]) == [0]


def test_a_layer_never_fills_up_by_rewiring() -> None:
    pruner = Dnr(Weights(stack([40, 10, 40])), keep=0.6)
    bound(pruner, scale=lambda i: 1e9**i)
    pruner.start()
    for _ in range(8):
        pruner.after_epoch()
    assert [int(mask.sum()) for mask in pruner.masks().values()] == [
        83,
        397,
    ]  # 198 stay, and 99 % of the 202 others come


def test_the_prune_rate_falls_along_a_cosine() -> None:
    pruner = Dnr(Weights(cases.build("conv")), keep=0.1, prune_rate=0.5)
    pruner.start(Plan(4, 10, lr=0.1))
    rates = []
    for _ in range(5):
        rates.append(pruner.metrics()["prune_rate"])
        pruner.after_epoch()
    assert rates == pytest.approx([0.25 * (1 + math.cos(math.pi * e / 4)) for e in (1, 2, 3, 4, 4)])
    assert rates[3] == 0
    constant = Dnr(Weights(cases.build("conv")), keep=0.1, prune_rate=0.3)
    constant.start()
    constant.after_epoch()
    assert constant.rate == 0.3


def test_the_last_epoch_does_not_change_the_masks() -> None:
    moved = []

    class Watched(Dnr):
        def after_epoch(self) -> None:
            before = {name: mask.clone() for name, mask in self.masks().items()}
            super().after_epoch()
            moved.append(any(not torch.equal(mask, before[name]) for name, mask in self.masks().items()))

    model = cases.build("conv")
    fit(model, Three(), Natural(), Watched(Weights(model), keep=0.1), epochs=3, lr=0.1)
    assert moved == [True, True, False]


def test_the_hybrid_loss_by_hand() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    pruner = Dnr(Weights(model), keep=1.0, clean_weight=0.25)
    x, y = torch.tensor([[0.75, 0.25]]), torch.tensor([0])
    calls = []

    def objective(model: nn.Module, x: Tensor, y: Tensor, forward: Any = None) -> Tensor:
        calls.append(forward)
        return torch.tensor(3.0)

    clean = math.log(1 + math.exp(-0.5))
    loss = pruner.wrap(objective)
    assert float(loss(model, x, y).detach()) == pytest.approx(0.25 * clean + 0.75 * 3)
    assert float(loss(model, x, y, forward=lambda z: 2 * model(z)).detach()) == pytest.approx(
        0.25 * math.log(1 + math.exp(-1)) + 0.75 * 3
    )
    assert calls[0] is None and calls[1] is not None
    # The worst image in the ball is known for this model: the margin shrinks by twice the radius.
    attacked = pruner.wrap(PgdTraining(epsilon=0.1, steps=10))
    expected = 0.25 * clean + 0.75 * math.log(1 + math.exp(-0.3))
    assert float(attacked(model, x, y).detach()) == pytest.approx(expected, rel=1e-5)
    assert Dnr(Weights(model), keep=1.0, clean_weight=0.0).wrap(objective) is objective


def test_dense_gradients_reach_the_momentum_while_the_weights_stay_zero() -> None:
    model, twin = cases.build("conv"), cases.build("conv")
    pruner = Dnr(Weights(model), keep=0.1, pull=0.0)
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.05, momentum=0.9)
    pruner.bind(optimizer)
    pruner.start()
    twin.load_state_dict(model.state_dict())
    x, y = cases.batch()
    for net in (model, twin):
        torch.manual_seed(0)
        nn.functional.cross_entropy(net(x), y).backward()
    pruner.after_backward()
    optimizer.step()
    pruner.after_step()
    for name, mask in pruner.masks().items():
        weight = model.get_parameter(name)
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], twin.get_parameter(name).grad)
        assert optimizer.state[weight]["momentum_buffer"][~mask].any()
        assert not weight[~mask].any()


def test_the_pull_is_the_gradient_of_the_distance_to_the_weights_after_the_next_rewiring() -> None:
    model = cases.build("conv")
    pruner = Dnr(Weights(model), keep=0.3, prune_rate=0.5, pull=0.2)
    pruner.start(Plan(4, 10, lr=0.1))
    decay = 0.5 * (1 + math.cos(math.pi / 4))
    for weight in pruner.units.weights:
        weight.grad = torch.ones_like(weight)
    pruner.after_backward()
    for (_, mask), weight in zip(pruner.masks().items(), pruner.units.weights, strict=True):
        left = slow_drop(weight.detach(), mask, 0.5 * decay, 1)
        target = torch.zeros(weight.numel())
        target[list(left)] = weight.detach().reshape(-1)[list(left)]
        w = weight.detach().clone().requires_grad_()
        (0.2 * decay / 2 * (w.reshape(-1) - target).square().sum()).backward()
        assert w.grad.any()
        torch.testing.assert_close(weight.grad, 1 + w.grad)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("stop_after", [2, 3, 7])
def test_resumed_equals_uninterrupted(stop_after: int, optimizer: str) -> None:
    def train(keeper: Memory) -> Dnr:
        model = cases.build("residual")
        pruner = Dnr(Weights(model), keep=0.1, pull=0.1, seed=3)
        make = None if optimizer == "sgd" else (lambda groups: torch.optim.AdamW(groups, lr=0.01))
        fit(model, Three(), PgdTraining(steps=1), pruner, epochs=4, lr=0.05, keeper=keeper, optimizer=make)
        return pruner

    expected, keeper = train(Memory()), Memory(stop_after)
    with pytest.raises(InterruptedError):
        train(keeper)
    resumed = train(Memory(state=keeper.state))
    assert resumed.epoch == expected.epoch == 4
    for name, mask in expected.masks().items():
        assert torch.equal(resumed.masks()[name], mask)
        assert torch.equal(resumed.units.model.get_parameter(name), expected.units.model.get_parameter(name))


def test_the_seed_draws_the_first_masks() -> None:
    units = Weights(cases.build("conv"))
    first, again, other = (Dnr(units, keep=0.1, strategy="erk", seed=s).masks() for s in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("strategy", ["lamp", "uniform"])
def test_a_strategy_that_depends_on_weights_resets_them_once(strategy: str) -> None:
    model = cases.build("conv")
    trained = model.features[0].weight.detach().clone()
    pruner = Dnr(Weights(model), keep=0.5, strategy=strategy)
    pruner.start()
    mask = pruner.masks()["features.0.weight"]
    started = model.features[0].weight.detach().clone()
    assert torch.equal(started[mask], trained[mask]) == (strategy == "uniform")
    pruner.start()  # as after a resume
    assert torch.equal(model.features[0].weight, started)


@pytest.mark.parametrize("options", [{"prune_rate": 1.0}, {"clean_weight": 1.1}, {"pull": -1.0}])
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=next(iter(options))):
        Dnr(Weights(cases.build("conv")), keep=0.1, **options)
