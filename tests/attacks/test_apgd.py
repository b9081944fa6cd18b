"""APGD: the paper's algorithm to the letter, and as strong as the authors' package."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.attacks import Apgd, ApgdDlr, ApgdT, Ball
from harp.attacks.apgd import checkpoints
from harp.attacks.batched import Packing
from harp.errors import RecipeError
from support import cases
from support.attacking import BALLS, Calls, right, run, task, trained
from support.interruption import go_on

KINDS: list[Any] = [Apgd, ApgdDlr, ApgdT]


# --- the paper, slowly -------------------------------------------------------------------------------------------


def dlr(z: Tensor, y: int, target: int | None) -> Tensor:
    order = z.sort(descending=True).values
    if target is not None:
        return -(z[y] - z[target]) / (order[0] - (order[2] + order[3]) / 2 + 1e-12)
    other = torch.cat([z[:y], z[y + 1 :]]).max()
    return -(z[y] - other) / (order[0] - order[2] + 1e-12)


def letter(
    f: Callable[[Tensor], Tensor], x: Tensor, start: Tensor, ball: Ball, steps: int, norm: str
) -> tuple[list[Tensor], list[float]]:
    """Algorithm 1 of the paper for one image: the points that it visits, and the step length at each."""

    def slope(point: Tensor) -> tuple[float, Tensor]:
        point = point.detach().requires_grad_(True)
        value = f(point)
        return value.item(), torch.autograd.grad(value, point)[0]

    def project(point: Tensor) -> Tensor:
        return ball.project(point[None], x[None])[0]

    def direction(gradient: Tensor) -> Tensor:
        return gradient.sign() if norm == "linf" else gradient / gradient.norm()

    p = [0.0, 0.22]
    while p[-1] < 1:
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    checkpoints = [math.ceil(round(share * steps, 6)) for share in p]

    eta, points, lengths = 2 * ball.epsilon, [start], [2 * ball.epsilon]
    value, gradient = slope(start)
    values = [value]
    best, best_value, best_gradient = start, value, gradient
    current, previous = start, start
    halved, value_at_check, last_check = True, value, 0
    for k in range(steps):
        aim = project(current + eta * direction(gradient))
        a = 1 if k == 0 else 0.75
        current, previous = project(current + a * (aim - current) + (1 - a) * (current - previous)), current
        value, gradient = slope(current)
        points.append(current)
        lengths.append(eta)
        values.append(value)
        if value > best_value:
            best, best_value, best_gradient = current, value, gradient
        if k + 1 in checkpoints:
            rises = sum(values[i + 1] > values[i] for i in range(last_check, k + 1))
            first = rises <= 0.75 * (k + 1 - last_check)  # the code counts equality, the paper does not
            second = not halved and best_value == value_at_check
            halved = first or second
            if halved:
                eta, current, gradient = eta / 2, best, best_gradient
            value_at_check, last_check = best_value, k + 1
    return points, lengths


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_trajectory_is_that_of_the_paper(kind: Any, norm: str) -> None:
    model, (x, y) = cases.build("conv").double().eval(), cases.batch(2)
    x, epsilon = x.double(), 1e-3 if norm == "linf" else 2e-2
    y = model(x).argmax(1)
    attack = kind(epsilon, norm, steps=100)
    visited: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            visited.append(x.detach().clone())
            return model(x)

    packing = run(attack, Spy(), x, y)
    assert not packing.fooled.any()  # the ball is small: every image takes every step
    assert len(visited) == 1 + attack.longest(4)
    clean = model(x).detach()
    for number, image in enumerate(x):
        order = [c for c in clean[number].argsort(descending=True).tolist() if c != y[number]]
        for aim in range(attack.aims(4)):
            mine = [points[number] for points in visited[1 + 101 * aim : 1 + 101 * (aim + 1)]]
            target = order[aim] if kind is ApgdT else None

            def loss(point: Tensor, label: int = int(y[number]), target: int | None = target) -> Tensor:
                z = model(point[None])[0]
                return F.cross_entropy(z[None], torch.tensor([label])) if kind is Apgd else dlr(z, label, target)

            expected, lengths = letter(loss, image, mine[0], Ball(epsilon, norm), 100, norm)
            for step, (one, other) in enumerate(zip(mine, expected, strict=True)):
                assert torch.allclose(one, other, atol=1e-9, rtol=0), (number, aim, step)
            assert lengths[-1] < lengths[0]  # it was halved on the way


def test_checkpoints_of_the_paper() -> None:
    windows = checkpoints(100, torch.device("cpu"))
    assert windows.nonzero().flatten().tolist() == [22, 41, 57, 70, 80, 87, 93, 99]
    assert windows[windows > 0].tolist() == [22, 19, 16, 13, 10, 7, 6, 6]


@given(st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_checkpoints_of_any_length(steps: int) -> None:
    windows = checkpoints(steps, torch.device("cpu"))
    at = windows.nonzero().flatten()
    assert len(windows) == steps + 1 and windows[0] == 0
    assert torch.equal(windows[at], at.diff(prepend=torch.zeros(1, dtype=torch.long)))
    assert (windows[at].diff() <= 0).all()


def test_starts_are_at_the_edge_of_the_ball() -> None:
    x = torch.full((16, 3, 8, 8), 0.5)
    for norm, epsilon in {"linf": 0.1, "l2": 0.4}.items():
        attack, generator, y = Apgd(epsilon, norm), torch.Generator().manual_seed(0), torch.zeros(16, dtype=torch.long)
        start = attack.begin(nn.Identity(), x, y, torch.zeros(16, 3), generator)["points"]
        offset = (start - x).flatten(1)
        size = offset.abs().amax(1) if norm == "linf" else offset.norm(dim=1)
        assert torch.allclose(size, torch.full((16,), epsilon), atol=1e-6)


# --- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_ratios(classes: int) -> None:
    z = torch.randn(20, classes, dtype=torch.double)
    y = torch.randint(classes, (20,))
    target = (y + 1 + torch.randint(classes - 1, (20,))) % classes
    order = z.sort(1, descending=True).values
    for row in range(20):
        true, aim = z[row, y[row]], z[row, target[row]]
        other = max(z[row, c] for c in range(classes) if c != y[row])
        ratio = order[row, 0] - order[row, 2] if classes > 2 else 1.0
        wide = order[row, 0] - (order[row, 2] + order[row, 3]) / 2 if classes > 3 else ratio
        assert ApgdDlr().loss(z, y, target)[row].item() == pytest.approx(float((other - true) / ratio))
        assert ApgdT().loss(z, y, target)[row].item() == pytest.approx(float((aim - true) / wide))


def test_ratios_of_equal_logits_are_finite() -> None:
    z = torch.zeros(3, 10, requires_grad=True)
    y, target = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    for kind in KINDS:
        loss = kind().loss(z, y, target)
        assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), z)[0].isfinite().all()


def test_words_name_the_loss_and_the_targets() -> None:
    assert Apgd().words(10) == "cross entropy"
    assert ApgdT().words(10) == "difference of logits ratio, towards 9 classes"
    assert "3 classes" in ApgdDlr().words(2) and "ratio" in ApgdDlr().words(3)
    assert "z₁ − z₃" in ApgdT().words(3) and "2 classes" in ApgdT().words(3)
    assert "margin" in ApgdT().words(2) and ApgdT().words(2).endswith("towards 1 class")
    assert [ApgdT().aims(n) for n in (2, 4, 10, 100)] == [1, 3, 9, 9]


def test_names_and_fields() -> None:
    assert Apgd().name == "apgd-ce-100" and Apgd(steps=50, restarts=5).name == "apgd-ce-50x5"
    assert ApgdDlr(steps=7).name == "apgd-dlr-7" and ApgdT().name == "apgd-t-100"
    for wrong in ({"steps": 0}, {"restarts": 0}, {"norm": "l1"}, {"epsilon": -1.0}, {"steps": 1.5}):
        with pytest.raises(RecipeError):
            Apgd(**wrong)
    with pytest.raises(RecipeError):
        ApgdT(targets=0)


# --- strength ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [2, 5])
def test_closed_form_of_a_linear_model(kind: Any, norm: str, classes: int) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(24, classes)
    model = nn.Sequential(nn.Flatten(), layer)
    x = 0.4 + 0.2 * torch.rand(100, 1, 4, 6)  # far from the edges of the box
    with torch.no_grad():
        layer.bias -= model(x).mean(0)
        w, z = layer.weight, model(x)
        y = z.argmax(1)
        apart = w[y][:, None] - w[None]
        dual = (apart.abs().sum(2) if norm == "linf" else apart.norm(dim=2)).scatter(1, y[:, None], 1)
        distance = ((z.gather(1, y[:, None]) - z) / dual).scatter(1, y[:, None], math.inf).amin(1)
    epsilon = distance.median().item() + 1e-6
    fooled = run(kind(epsilon, norm, steps=40), model, x, y).fooled
    assert not fooled[distance > epsilon * (1 + 1e-5)].any()
    missed = int((~fooled[distance < 0.995 * epsilon]).sum())
    if kind is not Apgd or classes == 2:  # the cross entropy of several classes is not highest at the nearest boundary
        assert missed <= (3 if kind is ApgdDlr else 0)
    assert fooled.any()


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("classes", [2, 4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_as_strong_as_the_package(kind: Any, classes: int, norm: str) -> None:
    package = pytest.importorskip("pyautoattack.autopgd_base")
    if classes < {Apgd: 2, ApgdDlr: 3, ApgdT: 4}[kind]:
        pytest.skip("the package has no such loss for so few classes")
    model, (x, y) = trained(classes), task(classes, 60)
    options = {"n_iter": 30, "norm": {"linf": "Linf", "l2": "L2"}[norm], "eps": BALLS[norm], "device": "cpu"}
    if kind is ApgdT:
        oracle = package.APGDAttack_targeted(model, n_target_classes=min(9, classes - 1), **options)
    else:
        oracle = package.APGDAttack(model, loss="ce" if kind is Apgd else "dlr", **options)
    theirs = right(model, oracle.perturb(x, y), y)
    ours = right(model, kind(BALLS[norm], norm, steps=30)(model, x, y), y)
    assert 0 < theirs.sum() < right(model, x, y).sum()
    assert (ours != theirs).sum() <= 5  # as many as differ between two seeds of the package
    assert ours.sum() <= theirs.sum() + 3


def test_restarts_and_targets_only_help() -> None:
    model, (x, y) = trained(10), task(10, 100)
    once, often = (int(run(ApgdDlr(0.04, steps=8, restarts=n), model, x, y).fooled.sum()) for n in (1, 4))
    few, many = (int(run(ApgdT(0.04, steps=8, targets=n), model, x, y).fooled.sum()) for n in (1, 9))
    assert often >= once and many >= few and often + many > once + few


# --- the contract ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("kind", KINDS)
def test_points_are_in_the_ball_and_the_box(kind: Any, norm: str) -> None:
    model, (x, y) = trained(4), task(4, 40)
    x[:10] = x[:10].round()
    packing = run(kind(BALLS[norm], norm, steps=10), model, x, y)
    offset = (packing.points - x).flatten(1)
    size = offset.abs().amax(1) if norm == "linf" else offset.norm(dim=1)
    assert size.max() <= BALLS[norm] + 1e-6
    assert packing.points.min() >= 0 and packing.points.max() <= 1
    assert torch.equal(~right(model, packing.points, y), packing.fooled)


@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_zero_is_natural(kind: Any) -> None:
    model, (x, y) = trained(4), task(4, 20)
    assert torch.equal(kind(0.0, steps=3)(model, x, y), x)
    packing = run(kind(0.0, steps=3), model, x, y)
    assert torch.equal(packing.points, x) and torch.equal(packing.fooled, ~right(model, x, y))


def test_the_model_is_unchanged() -> None:
    model, (x, y) = cases.build("conv"), cases.batch()
    model.train()
    model(x).sum().backward()
    modes = [module.training for module in model.modules()]
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    for fast in (True, False):
        ApgdT(0.05, steps=3, fast=fast)(model, x, y)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("attack", [Apgd(0.04, steps=12, restarts=2), ApgdT(0.5, "l2", steps=9)], ids=["ce", "t"])
@pytest.mark.parametrize("at", [1, 10, 23])
def test_interrupted_work_ends_with_the_same_bits(attack: Any, at: int, tmp_path: Path) -> None:
    model, (x, y) = trained(4), task(4, 30)
    whole = run(attack, model, x, y, batch=8)
    first, second = (Packing(attack, model, x, y, batch=8, seed=0) for _ in range(2))
    go_on(first, second, at, tmp_path / "state.pt")
    assert torch.equal(second.points, whole.points) and torch.equal(second.fooled, whole.fooled)
    assert second.ticks == whole.ticks


def test_the_result_depends_on_the_seed() -> None:
    model, (x, y) = trained(4), task(4, 20)
    one, same, other = (run(Apgd(0.04, steps=5), model, x, y, seed=seed).points for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 7, 500])
def test_the_size_of_the_batch_does_not_matter(batch: int) -> None:
    model, (x, y) = trained(4), task(4, 40)
    attack = ApgdT(0.04, steps=10)
    whole, packed = run(attack, model, x, y).fooled, run(attack, model, x, y, batch=batch).fooled
    assert (whole != packed).sum() <= 3
    assert ApgdT(0.04, steps=3)(model, x[:1], y[:1]).shape == x[:1].shape


def test_misclassified_and_fooled_images_cost_nothing_more() -> None:
    model, (x, y) = Calls(trained(4)), task(4, 40)
    mistaken = (model(x).argmax(1) + 1) % 4
    model.sizes.clear()
    assert run(Apgd(0.04), model, x, mistaken).fooled.all() and model.sizes == [40]
    model.sizes.clear()
    packing = run(Apgd(0.04, steps=20), model, x, y)
    assert model.sizes[0] == 40 and model.sizes[1] == int(right(model.inner, x, y).sum())
    assert model.sizes[-1] == int((~packing.fooled).sum())  # only they see the last step
    assert sum(model.sizes[1:]) < 21 * model.sizes[1]
