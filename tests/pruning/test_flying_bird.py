"""Flying Bird: what moves, when and how much; Flying Bird+: what makes it prune and grow, and that it comes back."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.errors import RecipeError
from harp.pruning import masks as mask_ops
from harp.pruning.allocation import allocate
from harp.pruning.methods.base import Plan
from harp.pruning.methods.flying_bird import FlyingBird, FlyingBirdPlus
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining, Trades
from support import cases


def begun(
    method: type[FlyingBird] = FlyingBird, plan: Plan | None = None, case: str = "conv", **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    pruner = method(Weights(cases.build(case)), **{"keep": 0.2, **options})
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    pruner.bind(optimizer)
    pruner.start(plan or Plan(4, 10, 0.1))
    return pruner, optimizer


def step(pruner: FlyingBird, optimizer: torch.optim.Optimizer) -> None:
    x, y = cases.batch(seed=pruner.step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(pruner.units.model(x), y).backward()
    pruner.after_backward()
    optimizer.step()
    pruner.after_step()


def live(pruner: FlyingBird) -> list[Tensor]:
    return [mask.clone() for mask in pruner.current().values()]


def test_a_move_drops_the_smallest_and_regrows_from_zero() -> None:
    still, other = begun(interval=99)  # the same training without a move
    pruner, optimizer = begun(interval=3)
    for trained in ((still, other), (pruner, optimizer)):
        torch.manual_seed(0)
        for _ in range(3):
            step(*trained)
    old, death = live(still), pruner.death
    weights = [weight.detach().clone() for weight in still.units.weights]
    for i, (weight, mask) in enumerate(zip(weights, old, strict=True)):
        now, new = live(pruner)[i], pruner.units.weights[i].detach()
        count = int(mask.sum())
        assert int(now.sum()) == count == pruner.counts[i]
        dropped, grown = mask & ~now, now & ~mask
        assert int(dropped.sum()) == int(grown.sum()) <= math.ceil(death * count)
        stay = mask_ops.top_k(torch.where(mask, weight.abs(), -1), count - math.ceil(death * count))
        assert now[stay].all()
        assert torch.equal(new[mask & now], weight[mask & now])
        assert not new[grown].any()
        momentum = optimizer.state[pruner.units.weights[i]]["momentum_buffer"]
        assert not momentum[~(mask & now)].any()


@given(
    keep=st.floats(0.02, 1.0),
    case=st.sampled_from(sorted(cases.CASES)),
    strategy=st.sampled_from(["igq", "erk", "uniform", "lamp"]),
    plus=st.booleans(),
    seed=st.integers(0, 2**30),
)
@settings(max_examples=20, deadline=None)
def test_the_counts_are_always_those_of_the_strategy(
    keep: float, case: str, strategy: str, plus: bool, seed: int
) -> None:
    method = FlyingBirdPlus if plus else FlyingBird
    units = Weights(cases.build(case))
    expected = allocate(strategy, units, units.total(keep))
    pruner, optimizer = begun(method, Plan(1, 4, 0.1), case, keep=keep, strategy=strategy, interval=1, seed=seed)
    for _ in range(4):
        assert [int(mask.sum()) for mask in pruner.masks().values()] == expected
        step(pruner, optimizer)
        for weight, mask in zip(pruner.units.weights, live(pruner), strict=True):
            assert not weight[~mask].any()


def moves(pruner: FlyingBird, optimizer: torch.optim.Optimizer, steps: int) -> list[int]:
    """The steps at which masks moved."""
    at = []
    for number in range(1, steps + 1):
        moved = pruner.moved
        step(pruner, optimizer)
        at += [number] if pruner.moved != moved else []
    return at


def test_intervals_are_a_third_longer_in_the_second_half_and_the_last_step_moves_nothing() -> None:
    assert moves(*begun(interval=6), 40) == [6, 12, 18, 26, 34]
    assert moves(*begun(interval=10), 40) == [10, 20, 33]
    assert moves(*begun(plan=Plan(1, 5, 0.1), interval=1), 5) == [1, 2, 3, 4]
    assert moves(*begun(plan=Plan(1, 5, 0.1)), 5) == [1, 2, 3, 4]
    pruner, optimizer = begun(plan=Plan(200, 352, 0.1))
    for half, interval in ((0, 900), (200 * 176, 1200)):
        pruner.moved, pruner.step = half, half + interval - 2
        assert moves(pruner, optimizer, 2) == [2]


def test_the_death_rate_falls_along_half_a_cosine() -> None:
    pruner, _ = begun()
    rates = []
    for pruner.step in (0, 20, 40, 90):
        rates.append(pruner.death)
    assert rates == pytest.approx([0.5, 0.2525, 0.005, 0.005])


def test_without_a_death_rate_the_masks_stay() -> None:
    pruner, optimizer = begun(interval=1, death_rate=0.0)
    before = live(pruner)
    assert moves(pruner, optimizer, 5) == []
    assert all(torch.equal(a, b) for a, b in zip(before, live(pruner), strict=True))


def test_only_a_strategy_that_depends_on_weights_resets_them() -> None:
    for strategy, fresh in (("lamp", True), ("igq", False)):
        model = cases.build("conv")
        before = copy.deepcopy(model.state_dict())
        pruner = FlyingBird(Weights(model), keep=0.2, strategy=strategy)
        pruner.start()
        mask = pruner.masks()["features.0.weight"]
        same = torch.equal(model.features[0].weight[mask], before["features.0.weight"][mask])
        assert same is not fresh
        assert torch.equal(model.features[1].bias, before["features.1.bias"]) is not fresh


def trained(method: type[FlyingBird], validate: Callable[[], dict[str, float]] | None) -> tuple[Any, nn.Module]:
    model = cases.build("conv")
    pruner = method(Weights(model), keep=0.2, interval=2)
    batches = [cases.batch(seed=seed) for seed in range(4)]
    fit(model, batches, PgdTraining(steps=1), pruner, epochs=6, validate=validate)
    return pruner, model


def test_without_validation_plus_is_flying_bird() -> None:
    (plain, model), (plus, twin) = trained(FlyingBird, None), trained(FlyingBirdPlus, None)
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name
    assert all(torch.equal(a, b) for a, b in zip(plain.masks().values(), plus.masks().values(), strict=True))


class Falling:
    """Validation that gets worse every epoch, or better."""

    def __init__(self, direction: float) -> None:
        self.value, self.direction = 0.5, direction

    def __call__(self) -> dict[str, float]:
        self.value += 0.01 * self.direction
        return {"robust": self.value}


@pytest.mark.parametrize("growing", [True, False])
def test_plus_grows_while_validation_falls_and_returns_to_the_budget(growing: bool) -> None:
    model = cases.build("conv")
    pruner = FlyingBirdPlus(Weights(model), keep=0.2, interval=2, prune_ratio=0.0, growth_ratio=0.5)
    densities: list[tuple[float, float, int]] = []

    def look(record: dict[str, Any]) -> None:
        count = mask_ops.kept(pruner.current())
        assert mask_ops.kept(pruner.masks()) == pruner.total
        assert pruner.ready == (count == pruner.total)
        for mask, least in zip(live(pruner), pruner.counts, strict=True):
            assert least <= int(mask.sum()) <= max(least, 1.5 * least)
        densities.append((record["rate"] * sum(pruner.units.sizes), pruner.progress, count))

    batches = [cases.batch(seed=seed) for seed in range(5)]
    validate = Falling(-1.0 if growing else 1.0)
    fit(model, batches, PgdTraining(steps=1), pruner, epochs=12, validate=validate, on_step=look)
    first = [count for _, progress, count in densities if progress < 0.5]
    middle = [count for _, progress, count in densities if 0.5 <= progress < 0.9]
    last = [count for _, progress, count in densities if progress >= 0.9]
    assert set(first) == set(last) == {pruner.total}
    assert (max(middle) > pruner.total) == growing
    assert all(a == pytest.approx(c) for a, _, c in densities)
    assert sum(int(weight.count_nonzero()) for weight in pruner.units.weights) <= pruner.total


def test_live_weights_beyond_the_budget_are_trained_and_resumed() -> None:
    plan = Plan(10, 10, 0.1)
    pruner, optimizer = begun(FlyingBirdPlus, plan, interval=2, growth_ratio=1.0)
    pruner.step = pruner.moved = 60
    pruner.validated = [0.5, 0.4, 0.3, 0.2, 0.1]
    for _ in range(15):
        step(pruner, optimizer)
    before = [weight.detach().clone() for weight in pruner.units.weights]
    assert sum(int(weight.count_nonzero()) for weight in before) > 1.2 * pruner.total
    answer = pruner.masks()
    with pruner.exact():
        assert sum(int(weight.count_nonzero()) for weight in pruner.units.weights) <= pruner.total
    pruner.start(plan)
    pruner.move(copy.deepcopy(pruner.current()))
    for weight, value, mask, alive in zip(pruner.units.weights, before, answer.values(), live(pruner), strict=True):
        assert torch.equal(weight, value)
        assert alive[mask].all()
        assert value[mask].abs().min() >= value[~mask].abs().max()
    pruner.step, pruner.interval = 89, 50  # at nine tenths, whether or not a move is due
    step(pruner, optimizer)
    assert pruner.ready


def test_plus_prunes_while_the_gap_widens() -> None:
    pruner, _ = begun(FlyingBirdPlus)
    pruner.step = 20
    more = [min(int(1.5 * count), high) for count, high in zip(pruner.counts, pruner.units.upper, strict=True)]
    assert pruner.targets(more) == more
    pruner.gaps = [0.1, 0.2, 0.1, 0.2, 0.2]  # two rises of four: half is enough
    expected = [
        max(least, count - math.ceil(0.4 * pruner.death * count))
        for count, least in zip(more, pruner.counts, strict=True)
    ]
    assert pruner.targets(more) == expected != more
    for gaps in ([0.1, 0.2, 0.1, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4]):  # one rise of four; too few epochs
        pruner.gaps = gaps
        assert pruner.targets(more) == more
    pruner.gaps, pruner.step = [0.1, 0.2, 0.3, 0.4, 0.5], 19
    assert pruner.targets(more) == more, "not in the first half"


@pytest.mark.parametrize("objective", [Natural(), PgdTraining(steps=2, clean_statistics=True), Trades(steps=2)])
def test_the_accuracy_of_training_is_that_of_the_loss_pass(objective: Any) -> None:
    model = cases.build("conv").eval()  # no dropout, so that a second pass answers the same
    pruner = FlyingBirdPlus(Weights(model), keep=0.5)
    counted = pruner.wrap(objective)
    right = seen = 0
    for seed in range(3):
        x, y = cases.batch(seed=seed)
        torch.manual_seed(seed)
        loss = counted(model, x, y)
        torch.manual_seed(seed)
        assert torch.equal(loss, objective(model, x, y))
        torch.manual_seed(seed)
        right += int((model(objective.attack(model, x, y)).argmax(1) == y).sum())
        seen += len(y)
    pruner.observe({"robust": 0.25})
    assert pruner.gaps == [right / seen - 0.25]
    assert pruner.answers.tolist() == [0, 0]
    counted(model, x, y)
    pruner.observe({"loss": 1.0})
    assert len(pruner.gaps) == 1
    assert pruner.answers.tolist() == [0, 0], "an epoch without validation does not count for the next"


def test_the_accuracy_of_training_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = FlyingBirdPlus(Weights(cases.build("conv")), keep=0.5)
    pruner.answers += torch.tensor([6, 8])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda answers: answers.add_(torch.tensor([2, 8])))
    pruner.observe({"robust": 0.25})
    assert pruner.gaps == [8 / 16 - 0.25]


def test_plus_uses_the_robust_accuracy_if_both_are_known() -> None:
    pruner = FlyingBirdPlus(Weights(cases.build("conv")), keep=0.5)
    for natural, robust in ((0.75, 0.25), (0.5, 0.125)):
        pruner.answers += torch.tensor([6, 8])
        pruner.observe({"natural": natural, "robust": robust})
    assert pruner.validated == [0.25, 0.125]
    assert pruner.gaps == [0.5, 0.625]


def test_an_objective_that_does_not_use_forward_is_not_measured() -> None:
    pruner = FlyingBirdPlus(Weights(cases.build("conv")), keep=0.5)

    def objective(model: nn.Module, x: Tensor, y: Tensor, forward: Any = None) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    pruner.wrap(objective)(pruner.units.model, *cases.batch())
    pruner.observe({"natural": 0.5})
    assert pruner.gaps == pruner.validated == []


@pytest.mark.parametrize(
    "options",
    [
        {"death_rate": 1.0},
        {"interval": 0},
        {"prune_ratio": -0.1},
        {"growth_ratio": -0.1},
        {"most": 0.9},
        {"window": 0},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        FlyingBirdPlus(Weights(cases.build("conv")), keep=0.1, **options)
