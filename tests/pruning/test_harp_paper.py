"""HARP against the paper: slow twins, finite differences, γ's figure, the learned strategy's shape."""

import math

import pytest
import torch
from torch import nn

from harp import models
from harp.attacks import Pgd
from harp.data.batches import Batches
from harp.data.registry import load
from harp.pruning.methods import Dense, Harp, Hydra
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import PgdTraining
from support import cases
from support.methods import Memory, Three, assert_same_state
from support.reference import Twin

KEEP = 0.05


def adversarial(model: nn.Module, x: torch.Tensor, y: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return Pgd(epsilon=0.05, step=0.02, steps=3, fast=False)(model, x, y)


def doubled(case: str) -> nn.Module:
    """Float64, so that no sign in the attack flips by rounding; no dropout, so that both draw alike."""
    model = cases.build(case).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("case", ["conv", "residual", "grouped"])
@pytest.mark.parametrize("learned_rates", [True, False], ids=["harp", "hydra"])
def test_twenty_steps_equal_those_of_the_reference_implementation(case: str, learned_rates: bool) -> None:
    model, gamma = doubled(case), 0.3
    units = Weights(model)
    pruner = Harp(units, keep=KEEP, published=True, gamma_step=gamma) if learned_rates else Hydra(units, keep=KEEP)
    rates = (
        None if learned_rates else {n: c / s for n, c, s in zip(units.names, pruner.counts, units.sizes, strict=True)}
    )
    twin = Twin(model, KEEP, rates)
    twin.total = pruner.total
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    fast, slow = torch.optim.SGD(pruner.trainable(), **settings), torch.optim.SGD(twin.parameters(), **settings)
    if learned_rates:  # both start at the same quotas: the reference uses the paper's formula, ours clips to integers
        for number, layer in enumerate(twin.layers.values()):
            layer.quota.data.copy_(pruner.quotas.data[number])
    pruner.start()
    for step in range(20):
        x, y = cases.batch(seed=step)
        x = x.double()
        for network, optimizer in ((model, fast), (twin.model, slow)):
            network.train()
            attacked = adversarial(network, x, y, step)
            loss = nn.functional.cross_entropy(network(attacked), y)
            if network is twin.model and learned_rates:
                loss = loss + gamma * twin.budget_loss()
            optimizer.zero_grad()
            loss.backward()
            if network is model:
                pruner.after_backward()
            optimizer.step()
        pruner.after_step()
        for number, (name, layer) in enumerate(twin.layers.items()):
            torch.testing.assert_close(pruner.scores[number], layer.scores, rtol=1e-6, atol=1e-6)
            if learned_rates:
                torch.testing.assert_close(pruner.quotas[number], layer.quota, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(model.get_parameter(name) != 0, _weight(layer) != 0)
    x = x.double()
    torch.testing.assert_close(model.eval()(x), twin.model.eval()(x), rtol=1e-6, atol=1e-6)


def _weight(layer: nn.Module) -> torch.Tensor:
    from support.reference import SortedMask

    return layer.layer.weight * SortedMask.apply(layer.scores.abs(), layer.density())


def test_the_quotas_gradient_is_that_of_a_layer_scaled_by_its_rate() -> None:
    """The straight-through rule ∂M/∂a = 1 means: adding δ to every entry of the mask is what raising the rate does."""
    model = doubled("conv").eval()
    pruner = Harp(Weights(model), keep=KEEP, published=True, gamma_step=0.2)
    torch.optim.SGD(pruner.trainable(), lr=0.1)
    pruner.start()
    x, y = cases.batch()
    x = x.double()

    def loss_at(layer: int, shift: float) -> float:
        """The loss with g(r + shift) in place of g(r), the mask's entries moving with the rate."""
        with torch.no_grad():
            before = pruner.rates()
            pruner.quotas[layer] += shift
            moved = pruner.rates()
            budget = float(pruner.budget_loss())
            pruner.quotas[layer] -= shift
            delta = float(moved[layer] - before[layer])
            weight = pruner.units.weights[layer]
            weight += delta * pruner.dense[layer]
            value = float(nn.functional.cross_entropy(model(x), y)) + pruner.gamma * budget
            weight -= delta * pruner.dense[layer]
        return value

    nn.functional.cross_entropy(model(x), y).backward()
    pruner.after_backward()
    for layer in range(len(pruner.units.names)):
        finite = (loss_at(layer, 1e-5) - loss_at(layer, -1e-5)) / 2e-5
        assert float(pruner.quotas.grad[layer]) == pytest.approx(finite, rel=1e-5, abs=1e-8)


def test_initial_quota_is_the_papers() -> None:
    units = Weights(models.build("vgg16", num_classes=10, shape=(3, 32, 32)))
    pruner = Harp(units, keep=0.001, published=True)
    exact = math.log((0.1 - 1e-4) / (1 - 0.1))
    assert exact == pytest.approx(-2.198225, abs=1e-6)
    large = [number for number, size in enumerate(units.sizes) if size > 100_000]
    assert pruner.quotas[large].tolist() == pytest.approx([exact] * len(large), abs=1e-4)
    assert pruner.rates().tolist() == pytest.approx([0.1] * len(units.sizes), abs=2e-4)
    counts = [int(mask.sum()) for mask in pruner.current().values()]
    assert counts == [n - int((1 - a) * n) for n, a in zip(units.sizes, pruner.rates().tolist(), strict=True)]


def test_gamma_follows_the_figure_of_the_paper() -> None:
    """VGG16 at 99 %: the budget loss first rounds to zero at the end of epoch 11, and γ stays 0.11 from then on."""
    figure = [6.9187, 4.3540, 2.9282, 2.0767, 1.3823, 0.9187, 0.5806, 0.3391, 0.1540, 0.0105, 0.0000]
    figure += [0.0007, 0.0002, 0.0007, 0.0004, 0.0004, 0.0000, 0.0001, 0.0001, 0.0000]
    pruner = Harp(Weights(cases.build("conv")), keep=0.01, published=True, gamma_step=0.01)
    gammas, ready = [], []
    for loss in figure:
        pruner.budget_loss = lambda value=loss: torch.tensor(value)  # the figure's losses instead of ours
        gammas.append(pruner.gamma)
        pruner.after_epoch()
        ready.append(pruner.ready)
    assert gammas == pytest.approx([0.01 * min(epoch, 11) for epoch in range(1, 21)])
    assert ready == [False] * 10 + [True] * 10


def spend(pruner: Harp, factor: float) -> None:
    """Shift all quotas until the soft rates spend so many times the budget."""
    with torch.no_grad():
        pruner.quotas += pruner.balance(factor * pruner.total)
    assert float(pruner.units.cost(pruner.rates().detach())) == pytest.approx(factor * pruner.total, rel=1e-4)


def test_an_epoch_can_be_chosen_within_one_per_cent_of_a_budget_that_was_met() -> None:
    pruner = Harp(Weights(cases.build("conv")), keep=0.05, published=True)
    ready = []
    for factor in (1.005, 0.99, 1.005, 1.015, 1.5, 0.99):
        state = pruner.state_dict()  # a resume between any two epochs makes no difference
        pruner = Harp(Weights(cases.build("conv")), keep=0.05, published=True)
        pruner.load_state_dict(state)
        spend(pruner, factor)
        pruner.after_epoch()
        ready.append(pruner.ready)
    assert ready == [False, True, True, False, False, True]
    assert pruner.gamma == pytest.approx(2 * pruner.step), "frozen since the second epoch"


@pytest.mark.parametrize("stop_after", [2, 4, 8, 13])  # epochs 1, 2, 3 and 5
def test_a_resumed_training_keeps_its_gamma(stop_after: int) -> None:
    def trained(keeper: Memory) -> tuple[list[tuple[float, float]], Harp]:
        model = cases.build("residual")
        pruner = Harp(Weights(model), keep=0.02, published=True, gamma_step=0.5)
        fitted = fit(model, Three(), PgdTraining(steps=1), pruner, epochs=5, lr=0.1, keeper=keeper)
        return [(record["gamma"], record["budget_loss"]) for record in fitted.history], pruner

    expected, pruner = trained(Memory())
    gammas = [gamma for gamma, _ in expected]
    assert gammas == pytest.approx([0.5, 1.0, 1.5, 1.5, 1.5]), "it grows until the budget is met"
    keeper = Memory(stop_after)
    with pytest.raises(InterruptedError):
        trained(keeper)
    result, resumed = trained(Memory(state=keeper.state))
    assert result == expected
    assert_same_state(resumed, pruner)


def quota_flow(keep: float, weight_decay: float, steps: int, gamma: float = 1.0) -> tuple[Weights, Harp]:
    """Train the quotas of VGG16's layer sizes under the budget loss alone."""
    units = Weights(models.build("vgg16", num_classes=10, shape=(3, 32, 32)))
    pruner = Harp(units, keep=keep, published=True, gamma_step=gamma)
    optimizer = torch.optim.SGD([pruner.quotas], lr=0.02, weight_decay=weight_decay)
    for _ in range(steps):
        optimizer.zero_grad()
        pruner.pull([None] * len(units.sizes))
        optimizer.step()
        if float(pruner.budget_loss().detach()) == 0:
            break
    return units, pruner


def test_without_a_task_the_rates_follow_the_closed_form() -> None:
    """a(t) = a_min + 1 / (1 / (a_0 - a_min) + C n): equal layers end equal, large ones with the same count."""
    units, pruner = quota_flow(0.001, 0.0, 100_000)
    low = 1e-4
    excess = [a - low for a in pruner.rates().tolist()]
    slopes = [(1 / e - 1 / (0.1 - low)) / n for e, n in zip(excess, units.sizes, strict=True)]
    large = [slope for slope, n in zip(slopes, units.sizes, strict=True) if n > 10_000]
    assert max(large) / min(large) < 1.15  # g' is not quite a - a_min while a is still near 0.1
    rates = pruner.rates().tolist()
    assert rates[8:13] == pytest.approx([rates[8]] * 5, rel=1e-6)
    assert rates[5] == pytest.approx(rates[6], rel=1e-6)
    assert sum(rates[i] * units.sizes[i] for i in range(16)) == pytest.approx(15_303, rel=2e-3)


def test_equal_middle_layers_end_with_nearly_equal_rates() -> None:
    """Trained on real images under attack: as in the paper's tables, only the first and last layers stand out."""
    data = load("digits")
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))
    units, batches = Weights(model), Batches(data.train, 64, seed=0)
    objective = PgdTraining(epsilon=0.1, steps=2)
    fit(model, batches, objective, Dense(units), epochs=2, lr=0.1)
    pruner = Harp(units, keep=0.05, published=True, gamma_step=0.1)
    fit(model, batches, objective, pruner, epochs=5, lr=0.1)
    first, *middle, last = pruner.rates().tolist()
    assert max(middle) / min(middle) < 1.25
    assert first > 2 * max(middle)
    assert last > 2 * max(middle)


def test_a_target_above_the_initial_rate_starts_at_the_target() -> None:
    pruner = Harp(Weights(cases.build("conv")), keep=0.4, published=True)
    assert float(pruner.budget_loss().detach()) < 0.02
    assert pruner.rates().min() > 0.35
