"""Attacks: inside the ball and the box, of a higher loss, and the model does not notice."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import ATTACKS, Ball, CwInf, Fgsm, Pgd, named
from harp.errors import DataError, ModelError, RecipeError
from support import cases
from support.attacking import assert_untouched, drawn_from, snapshot

EPSILON = 0.05
MAKERS: dict[str, Any] = {
    "fgsm": lambda **more: Fgsm(EPSILON, **more),
    "fgsm-l2": lambda **more: Fgsm(1.0, "l2", **more),
    "pgd": lambda **more: Pgd(EPSILON, 0.02, 4, **more),
    "pgd-l2": lambda **more: Pgd(1.0, 0.4, 4, norm="l2", **more),
    "pgd-x3": lambda **more: Pgd(EPSILON, 0.02, 3, 3, **more),
    "cw": lambda **more: CwInf(EPSILON, 0.02, 4, **more),
}


def with_every_attack_and_model(test: Any) -> Any:
    return pytest.mark.parametrize("attack", MAKERS)(pytest.mark.parametrize("name", cases.CASES)(test))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(copy.deepcopy(model).eval()(x), y, reduction="none")


def undecided(name: str, x: Tensor) -> nn.Module:
    """A model in eval mode whose answers on `x` are of all classes, so that an attack has something to change."""
    model = cases.build(name).eval()
    *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        last.bias -= model(x).mean(0)
    return model


@with_every_attack_and_model
def test_contract(attack: str, name: str) -> None:
    model, (x, y) = cases.build(name), cases.batch()
    model.train()
    next(iter(model.children())).eval()
    model(x).sum().backward()  # gradients and statistics that must stay
    next(iter(model.parameters())).requires_grad_(False)
    before, original = snapshot(model), x.clone()
    instance = MAKERS[attack]()
    with torch.no_grad():  # a caller's
        x_adv = instance(model, x, y)
    assert_untouched(model, before)
    assert torch.equal(x, original)
    assert not x_adv.requires_grad and x_adv.grad_fn is None and x_adv.dtype == x.dtype and x_adv.shape == x.shape
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    offset = (x_adv - x).flatten(1)
    size = offset.abs().amax(1) if instance.norm == "linf" else offset.norm(dim=1)
    assert size.max() <= instance.epsilon * (1 + 1e-5) + 1e-7
    assert size.max() > 0.5 * instance.epsilon
    assert losses(model, x_adv, y).sum() > losses(model, x, y).sum()


@with_every_attack_and_model
def test_deterministic_under_a_seed(attack: str, name: str) -> None:
    model, (x, y) = cases.build(name), cases.batch(4)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(MAKERS[attack]()(model, x, y))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_image_does_not_depend_on_its_batch(name: str, norm: str) -> None:
    model, (x, y) = cases.build(name).double(), cases.batch()
    attack = Pgd(0.3, 0.1, 3, norm=norm, random_start=False)
    whole, part = attack(model, x.double(), y), attack(model, x[3:5].double(), y[3:5])
    assert torch.allclose(whole[3:5], part, atol=1e-9)


@pytest.mark.parametrize("name", cases.CASES)
def test_fast_and_plain_agree(name: str) -> None:
    model, (x, y) = cases.build(name).double(), cases.batch()
    found = [CwInf(EPSILON, 0.02, 3, random_start=False, fast=fast)(model, x.double(), y) for fast in (True, False)]
    assert torch.allclose(*found, atol=1e-12)


def test_modes_are_restored_after_an_exception() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), Failing())
    before, (x, y) = snapshot(model), cases.batch()
    with pytest.raises(RuntimeError, match="broken"):
        Pgd()(model, x, y)
    assert_untouched(model, before)


def linear(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes)).double()


def test_on_a_linear_model_all_reach_the_closed_form() -> None:
    """With two classes the loss grows with z_j − z_y: the best point is x + ε sign(w_j − w_y)."""
    model, (x, y) = linear(2), cases.batch()
    x, y = x.double() * 0.5 + 0.25, y % 2
    weight = model[1].weight
    difference = weight[1 - y] - weight[y]
    best = x + EPSILON * difference.sign().view_as(x)
    for attack in (Fgsm(EPSILON), Pgd(EPSILON, 0.02, 8), CwInf(EPSILON, 0.02, 8)):
        assert torch.allclose(attack(model, x, y), best, atol=1e-12)
    best = x + 0.2 * F.normalize(difference).view_as(x)
    for attack in (Fgsm(0.2, "l2"), Pgd(0.2, 0.4, 30, norm="l2")):
        assert torch.allclose(attack(model, x, y), best, atol=1e-6)


def test_l2_steps_survive_tiny_gradients() -> None:
    direction = Ball(1.0, "l2").steepest(torch.tensor([[1e-30, 0.0], [3e-30, 4e-30], [0.0, 0.0]]))
    assert torch.allclose(direction, torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 0.0]]))


def test_random_start_is_in_the_ball_and_the_box() -> None:
    x = torch.rand(64, 3, 8, 8).round()  # every pixel on the border of the box
    for ball in (Ball(0.1), Ball(2.0, "l2")):
        start = ball.random(x)
        offset = (start - x).flatten(1)
        size = offset.abs().amax(1) if ball.norm == "linf" else offset.norm(dim=1)
        assert start.min() >= 0 and start.max() <= 1 and size.max() <= ball.epsilon + 1e-6
        assert not torch.equal(start[0], start[1])


def test_random_starts_are_uniform_in_the_maximum_norm() -> None:
    x = torch.full((20_000, 1, 1, 3), 0.5)
    offset = (Ball(0.2).random(x) - x).flatten(1) / 0.2
    for pixel in offset.T:
        assert drawn_from(lambda value: (1 + value) / 2, pixel)
    assert float(torch.corrcoef(offset.T).sub(torch.eye(3)).abs().max()) < 0.02  # pixels are drawn independently


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 2, 2)])
def test_random_starts_are_uniform_in_the_euclidean_norm(shape: tuple[int, ...]) -> None:
    """The ball of half the radius has a share of 1/2^d of the volume, and there is no preferred direction."""
    x = torch.full((20_000, *shape), 0.5)
    offset = (Ball(0.2, "l2").random(x) - x).flatten(1) / 0.2
    pixels = offset.shape[1]
    assert drawn_from(lambda radius: radius**pixels, offset.norm(dim=1))
    second = offset.T @ offset / len(x) * (pixels + 2)  # the variance of a pixel in the unit ball is 1 / (d + 2)
    assert float((second - torch.eye(pixels)).abs().max()) < 0.04
    if pixels == 3:
        for pixel in offset.T:
            assert drawn_from(lambda value: (2 + 3 * value - value**3) / 4, pixel)


def test_epsilon_zero_and_empty_batches() -> None:
    model, (x, y) = cases.build("conv"), cases.batch()
    for code, kind in ATTACKS.items():
        assert torch.equal(kind(epsilon=0.0)(model, x, y), x), code
        assert kind()(model, x[:0], y[:0]).shape == (0, 3, 8, 8)


def test_restarts_keep_the_worst_point_and_skip_fooled_images() -> None:
    class Counting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.sizes = inner, []

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(len(x))
            return self.inner(x)

    x = cases.batch(32)[0]
    model = Counting(undecided("conv", x))
    y = model(x).argmax(1)
    model.sizes.clear()
    torch.manual_seed(1)
    attack = Pgd(0.02, 0.002, 2, 4, fast=False)
    x_adv = attack(model, x, y)
    sizes = [model.sizes[i : i + 3] for i in range(0, len(model.sizes), 3)]
    assert all(len(set(group)) == 1 for group in sizes)  # two steps and a look at the result
    counts = [group[0] for group in sizes]
    assert counts == sorted(counts, reverse=True) and 1 < counts[-1] < counts[0] == 32
    torch.manual_seed(1)
    once = Pgd(0.02, 0.002, 2, fast=False)(model, x, y)
    right_many, right_once = model.inner(x_adv).argmax(1) == y, model.inner(once).argmax(1) == y
    assert torch.equal(x_adv[~right_once], once[~right_once])
    assert right_many.sum() <= right_once.sum()
    assert (losses(model.inner, x_adv, y) >= losses(model.inner, once, y) - 1e-6)[right_many].all()


def test_robust_accuracy_falls_with_epsilon() -> None:
    x = cases.batch(64)[0]
    model = undecided("residual", x)
    y = model(x).argmax(1)
    right = []
    for epsilon in (0.0, 0.005, 0.02, 0.08):
        x_adv = Pgd(epsilon, epsilon / 4, 8, random_start=False)(model, x, y)
        right.append(int((model(x_adv).argmax(1) == y).sum()))
    assert right == sorted(right, reverse=True) and right[0] == 64 > right[-1]


def test_under_inference_mode_and_autocast() -> None:
    model = cases.build("conv")
    with torch.inference_mode():
        x, y = cases.batch()
        x_adv = Pgd(EPSILON)(model, x, y)
    assert losses(model, x_adv, y.clone()).sum() > losses(model, x, y.clone()).sum()
    with torch.autocast("cpu", torch.bfloat16):
        x_adv = Pgd(EPSILON)(model, x.clone(), y.clone())
    assert x_adv.dtype == torch.float32
    assert losses(model, x_adv, y.clone()).sum() > losses(model, x, y.clone()).sum()


def test_named() -> None:
    assert named("fgsm", epsilon=0.1) == Fgsm(0.1)
    assert named("pgd") == Pgd()
    assert named("pgd-20", epsilon=0.1, norm="l2") == Pgd(0.1, steps=20, norm="l2")
    assert named("pgd-20x5") == Pgd(steps=20, restarts=5)
    assert named("cw") == CwInf(steps=20)
    assert named("cw-40") == CwInf(steps=40)
    for text in ("fgsm", "pgd-20", "pgd-20x5", "cw-30"):
        assert named(text).name == text
    for text in ("apgd", "pgd-", "pgd-2x", "PGD-10", "fgsm-5", ""):
        with pytest.raises(RecipeError):
            named(text)
    for fields in ({"steps": 3}, {"speed": 1}):
        with pytest.raises(RecipeError, match="pgd-20"):
            named("pgd-20", **fields)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Pgd, {"epsilon": -0.1}),
        (Pgd, {"epsilon": float("nan")}),
        (Pgd, {"epsilon": float("inf")}),
        (Pgd, {"epsilon": "eight"}),
        (Pgd, {"epsilon": 8}),
        (Pgd, {"step": 2}),
        (Pgd, {"step": -1}),
        (Pgd, {"steps": -1}),
        (Pgd, {"steps": 2.5}),
        (Pgd, {"restarts": 0}),
        (Pgd, {"restarts": 2, "random_start": False}),
        (Pgd, {"norm": "l1"}),
        (Fgsm, {"epsilon": -1}),
        (Fgsm, {"norm": "linfty"}),
        (CwInf, {"kappa": -1}),
        (CwInf, {"norm": "l2"}),
    ],
)
def test_invalid_fields_are_refused(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as error:
        kind(**fields)
    assert "\n" not in str(error.value)


def test_invalid_inputs_are_refused() -> None:
    model, (x, y) = cases.build("conv"), cases.batch()
    for images in (x * 255, x - 0.5, x * float("nan"), (x * 255).byte()):
        with pytest.raises(DataError):
            Pgd()(model, images, y)
    for labels in (y[:3], y.float(), y[:, None]):
        with pytest.raises(DataError):
            Pgd()(model, x, labels)
    for value in (-3e-6, 1 + 3e-6):  # three times what rounding is given
        with pytest.raises(DataError, match=r"in \[0, 1\]"):
            Pgd()(model, x.masked_fill(torch.arange(8) == 5, value), y)
    for value in (-7e-7, 1 + 7e-7):
        x_adv = Pgd(0.0)(model, x.masked_fill(torch.arange(8) == 5, value), y)
        assert torch.equal(x_adv, x.masked_fill(torch.arange(8) == 5, round(value)))
    with pytest.raises(ModelError, match="logits"):
        Pgd()(nn.Identity(), x, y)
    with pytest.raises(ModelError, match="logits"):
        Pgd()(nn.LSTM(8, 8, batch_first=True), x[:, 0], y)


def test_kappa_limits_the_loss() -> None:
    logits, y = torch.tensor([[1.0, 3.0, 0.0], [5.0, 1.0, 2.0]]), torch.tensor([0, 0])
    assert CwInf(kappa=50).loss(logits, y).tolist() == [-48.0, -53.0]
    assert CwInf(kappa=0).loss(logits, y).tolist() == [0.0, -3.0]
