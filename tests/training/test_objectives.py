"""Objectives: the papers' losses, on what the papers' attacks find, in the mode of the caller."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Pgd
from harp.attacks.fast_forward import frozen
from harp.errors import RecipeError
from harp.training.objectives import OBJECTIVES, Mart, Natural, PgdTraining, Trades
from support import cases

ADVERSARIAL: dict[str, Any] = {"pgd": PgdTraining, "trades": Trades, "mart": Mart}


class Table(nn.Module):
    """Two images of one pixel with logits that are easy to write down: (x, 0, −x) · scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1) * torch.stack([self.scale, 0 * self.scale, -self.scale])


CLEAN, MOVED = torch.tensor([0.2, 0.9]).double(), torch.tensor([0.5, 0.4]).double()
LABELS = torch.tensor([0, 2])


def softmax(z: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in z)
    return [math.exp(value) / total for value in z]


def probabilities(x: Tensor) -> list[list[float]]:
    return [softmax([value, 0.0, -value]) for value in x.tolist()]


def divergences() -> list[float]:
    pairs = zip(probabilities(CLEAN), probabilities(MOVED), strict=True)
    return [sum(p * math.log(p / q) for p, q in zip(one, other, strict=True)) for one, other in pairs]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attack ends at MOVED."""
    for kind in ADVERSARIAL.values():
        monkeypatch.setattr(kind, "attack", lambda self, model, x, y: MOVED.reshape(x.shape))


def loss(objective: Any) -> float:
    return objective(Table(), CLEAN.reshape(2, 1, 1, 1), LABELS).item()


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize(("steps", "expected"), [(1, 10), (9, 10), (11, 11), (20, 20)])
def test_validation_uses_the_attack_of_training_with_at_least_ten_steps(name: str, steps: int, expected: int) -> None:
    objective = ADVERSARIAL[name](epsilon=0.5, step=0.2, steps=steps, norm="l2")
    assert objective.judge() == Pgd(0.5, 0.2, expected, norm="l2")
    assert ADVERSARIAL[name](steps=steps).judge() == Pgd(8 / 255, None, expected)


def test_natural_by_hand() -> None:
    expected = -sum(math.log(p[y]) for p, y in zip(probabilities(CLEAN), LABELS, strict=True)) / 2
    assert loss(Natural()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("moved")
def test_pgd_by_hand() -> None:
    expected = -sum(math.log(p[y]) for p, y in zip(probabilities(MOVED), LABELS, strict=True)) / 2
    assert loss(PgdTraining()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("moved")
def test_trades_by_hand() -> None:
    natural = -sum(math.log(p[y]) for p, y in zip(probabilities(CLEAN), LABELS, strict=True)) / 2
    assert loss(Trades()) == pytest.approx(natural + 6 * sum(divergences()) / 2, rel=1e-12)


@pytest.mark.usefixtures("moved")
def test_mart_by_hand() -> None:
    total = 0.0
    for clean, adversarial, y, kl in zip(
        probabilities(CLEAN), probabilities(MOVED), LABELS.tolist(), divergences(), strict=True
    ):
        rival = max(p for j, p in enumerate(adversarial) if j != y)
        total += -math.log(adversarial[y]) - math.log(1.0001 - rival + 1e-12)
        total += 5 * kl * (1 - clean[y] + 1e-7)
    assert loss(Mart()) == pytest.approx(total / 2, rel=1e-12)


@pytest.mark.usefixtures("moved")
def test_trades_gradient_goes_through_both_distributions() -> None:
    model = Table()
    value = Trades()(model, CLEAN.reshape(2, 1, 1, 1), LABELS)
    (gradient,) = torch.autograd.grad(value, model.scale)
    values = []
    for offset in (1e-6, -1e-6):
        with torch.no_grad():
            model.scale.fill_(1 + offset)
        values.append(Trades()(model, CLEAN.reshape(2, 1, 1, 1), LABELS).item())
    assert gradient.item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("name", ["residual", "grouped"])
def test_no_attack_leaves_the_clean_loss(name: str) -> None:
    model, (x, y) = cases.build(name), cases.batch()
    natural = Natural()(copy.deepcopy(model), x, y)
    assert torch.equal(PgdTraining(epsilon=0.0)(copy.deepcopy(model), x, y), natural)
    assert torch.allclose(Trades(epsilon=0.0, beta=1e3)(copy.deepcopy(model), x, y), natural, rtol=1e-5)
    assert torch.equal(
        Mart(epsilon=0.0, beta=0.0)(model, x, y), Mart(epsilon=0.0, beta=5.0)(copy.deepcopy(model), x, y)
    )


@pytest.mark.parametrize("name", cases.CASES)
def test_the_trades_attack_equals_that_of_the_paper(name: str) -> None:
    """The clean distribution is constant: the reference computes it in each step, on the plain model."""
    model, (x, y) = cases.build(name).double(), cases.batch()
    x = x.double()
    torch.manual_seed(5)
    x_adv = Trades(epsilon=0.05, step=0.02, steps=4).attack(model, x, y)
    torch.manual_seed(5)
    points = (x + 0.001 * torch.randn_like(x)).clamp(0, 1)
    with frozen(model, x, fast=False) as net:
        for _ in range(4):
            points.requires_grad_(True)
            divergence = F.kl_div(net(points).log_softmax(1), net(x).softmax(1), reduction="sum")
            (gradient,) = torch.autograd.grad(divergence, points)
            points = points.detach() + 0.02 * gradient.sign()
            points = torch.minimum(torch.maximum(points, x - 0.05), x + 0.05).clamp(0, 1)
    assert torch.allclose(x_adv, points, atol=1e-12)


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_contract(kind: str, name: str, norm: str) -> None:
    model, (x, y) = cases.build(name), cases.batch()
    model.train()
    next(iter(model.children())).eval()
    modes = [module.training for module in model.modules()]
    objective = ADVERSARIAL[kind](epsilon=0.05, step=0.02, steps=2, norm=norm)
    x_adv = objective.attack(model, x, y)
    offset = (x_adv - x).flatten(1)
    assert 0 < (offset.abs().max() if norm == "linf" else offset.norm(dim=1).max()) <= 0.05 + 1e-6
    assert x_adv.min() >= 0 and x_adv.max() <= 1 and not x_adv.requires_grad
    seen: list[list[bool]] = []

    def forward(images: Tensor) -> Tensor:
        seen.append([module.training for module in model.modules()])
        return model(images)

    value = objective(model, x, y, forward)
    assert all(p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert seen == [modes] * (1 if kind == "pgd" else 2)
    value.backward()
    assert value.ndim == 0 and value.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_statistics_come_from_the_loss_pass_and_an_optional_clean_pass() -> None:
    x, y = cases.batch()
    plain, twice = cases.build("conv"), cases.build("conv")
    for model, clean in ((plain, False), (twice, True)):
        PgdTraining(steps=1, clean_statistics=clean)(model, x, y)
        assert model.features[1].num_batches_tracked == 1 + clean
    first = cases.build("conv")
    mean = first.features[1].running_mean.clone()
    batch = first.features[0](x).mean((0, 2, 3))
    torch.manual_seed(0)
    x_adv = PgdTraining(steps=1).attack(first.train(), x, y)
    assert torch.equal(first.features[1].running_mean, mean)
    torch.manual_seed(0)
    PgdTraining(steps=0, epsilon=0.0, clean_statistics=True)(first, x, y)
    assert torch.allclose(first.features[1].running_mean, 0.81 * mean + 0.19 * batch, atol=1e-6)
    assert not torch.equal(x_adv, x)


def test_a_few_steps_of_training_lower_the_loss() -> None:
    x, _ = cases.batch(64)
    y = (x.mean((1, 2, 3)) > 0.5).long()
    for kind, objective in {**ADVERSARIAL, "natural": Natural}.items():
        model = cases.build("conv")
        minimised = objective() if kind == "natural" else objective(epsilon=0.01, step=0.005, steps=2)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        values = []
        for _ in range(15):
            optimiser.zero_grad()
            value = minimised(model, x, y)
            value.backward()
            optimiser.step()
            values.append(value.item())
        assert sum(values[-3:]) < 0.9 * sum(values[:3]), kind


def test_objectives_of_the_table_check_their_fields() -> None:
    assert set(OBJECTIVES) == {"natural", "pgd", "fast", "free", "trades", "mart"}
    assert OBJECTIVES["trades"](epsilon=0.1, steps=3) == Trades(epsilon=0.1, steps=3, beta=6)
    for kind in (PgdTraining, Trades, Mart):
        for fields in ({"epsilon": -1}, {"steps": 1.5}, {"norm": "l0"}):
            with pytest.raises(RecipeError):
                kind(**fields)
    for kind in (Trades, Mart):
        with pytest.raises(RecipeError):
            kind(beta=-1)
