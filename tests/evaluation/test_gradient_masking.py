"""Planted faults fire their check; sound models, robust or not, raise no suspicion."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Ball, Pgd
from harp.data import registry
from harp.errors import DataError, RecipeError
from harp.evaluation.gradient_masking import _ascent, inspect
from harp.models.normalize import Normalized
from support.findings import suspicious, verdicts

BALL = Ball(0.1, "linf")


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def trained(
    model: nn.Module, attack: Pgd | None = None, prepare: Callable[[Tensor], Tensor] = lambda x: x
) -> nn.Module:
    part = registry.load("digits").train
    images, labels = part.images.float() / 255, part.labels.long()
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        for batch in torch.randperm(len(images)).split(64):
            x, y = images[batch], labels[batch]
            x = x if attack is None else attack(model, x, y)
            optimiser.zero_grad()
            F.cross_entropy(model.train()(prepare(x)), y).backward()
            optimiser.step()
    return model.eval()


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    part = registry.load("digits").test
    return part.images[:96].float() / 255, part.labels[:96].long()


@pytest.fixture(scope="module")
def sound() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    attack = Pgd(0.1, 0.05, 3)
    return {
        "natural": trained(cnn()),
        "natural, normalised": trained(Normalized(cnn(), [0.3], [0.37])),
        "robust": trained(cnn(), attack),
        "robust, normalised": trained(Normalized(cnn(), [0.3], [0.37]), attack),
    }


class Around(nn.Module):
    """A sound model with something before it and something behind it."""

    def __init__(
        self,
        net: nn.Module,
        before: Callable[[Tensor], Tensor] | None = None,
        behind: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.net, self.before, self.behind = net, before or (lambda x: x), behind or (lambda z: z)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.net(self.before(x)))


CHECKS = [
    "inputs", "logits", "normalisation", "determinism", "state", "gradients",
    "preprocessing", "ascent", "vanishing", "steps", "noise", "budget",
]  # fmt: skip


@pytest.mark.parametrize("name", ["natural", "natural, normalised", "robust", "robust, normalised"])
@pytest.mark.parametrize("ball", [BALL, Ball(0.8, "l2")], ids=["linf", "l2"])
def test_sound_models_raise_no_suspicion(
    sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor], name: str, ball: Ball
) -> None:
    findings = inspect(sound[name], *batch, ball)
    assert suspicious(findings) == {}, findings
    assert [finding.check for finding in findings] == CHECKS


def test_the_model_and_the_random_state_stay_as_they_are(
    sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor]
) -> None:
    model = Stateful(Noisy(sound["robust"])).train()
    model.net.net[1].eval()  # type: ignore[union-attr,index]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    flags = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first = inspect(model, *batch, BALL, seed=5)
    assert flags == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert model.count == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert inspect(model, *batch, BALL, seed=5) == first
    for parameter in model.parameters():
        parameter.grad = None
    sound["robust"].eval()


class Noisy(nn.Module):
    """A random layer that eval mode does not turn off."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.randn_like(x))


class Stateful(nn.Module):
    """Answers depend on how often it was asked; counted in an attribute and in a buffer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.count = net, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        return self.net(x) + 0.5 * self.count * torch.arange(10)


class Quantised(torch.autograd.Function):
    """Eight levels, with a gradient as if there were no levels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Backwards(torch.autograd.Function):
    """The identity, with a gradient that points the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def of_the_batch(z: Tensor) -> Tensor:
    return F.batch_norm(z, None, None, training=True)


# What each fault must set off, at least.
FAULTS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, str]]] = {
    "softmax": (lambda net: Around(net, behind=lambda z: z.softmax(1)), {"logits": "bad"}),
    "log-softmax": (lambda net: Around(net, behind=lambda z: z.log_softmax(1)), {"logits": "look"}),
    "not finite": (lambda net: Around(net, behind=lambda z: z / 0), {"logits": "bad"}),
    "detached": (
        lambda net: Around(net, before=lambda x: x.detach()),
        {"gradients": "bad", "ascent": "bad", "budget": "bad"},
    ),
    "noise": (Noisy, {"determinism": "bad"}),
    "dropout": (lambda net: Around(net, before=lambda x: F.dropout(x, 0.2, training=True)), {"determinism": "bad"}),
    "counter": (Stateful, {"state": "bad"}),
    "batch statistics": (lambda net: Around(net, behind=of_the_batch), {"state": "bad"}),
    "quantised": (
        lambda net: Around(net, before=lambda x: torch.round(x * 8) / 8),
        {"gradients": "bad", "preprocessing": "bad"},
    ),
    "quantised, with a gradient": (lambda net: Around(net, before=Quantised.apply), {"preprocessing": "bad"}),
    "backwards": (lambda net: Around(net, before=Backwards.apply), {"preprocessing": "bad", "ascent": "bad"}),
    "confident": (lambda net: Around(net, behind=lambda z: 30 * z), {"vanishing": "bad"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor], fault: str) -> None:
    plant, expected = FAULTS[fault]
    findings = inspect(plant(sound["natural"]).eval(), *batch, BALL)
    found = verdicts(findings)
    assert {check: found.get(check) for check in expected} == expected, findings
    if "determinism" not in expected:
        assert found.get("determinism", "good") == "good"
    if "state" not in expected:
        assert found.get("state", "good") == "good"


def test_random_and_stateful_are_told_apart(sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor]) -> None:
    noisy = verdicts(inspect(Noisy(sound["robust"]), *batch, BALL))
    assert (noisy["determinism"], noisy["state"]) == ("bad", "good")
    counting = verdicts(inspect(Stateful(sound["robust"]), *batch, BALL))
    assert (counting["determinism"], counting["state"]) == ("good", "bad")


def test_a_buffer_that_eval_mode_changes_is_worth_a_look(
    sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor]
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = sound["natural"]
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    (state,) = (each for each in inspect(Counting(), *batch, BALL) if each.check == "state")
    assert state.verdict == "look" and "calls" in state.text


def test_normalisation_outside_the_model(batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(1)
    model = trained(cnn(), prepare=lambda x: (x - 0.3) / 0.2)
    outside = verdicts(inspect(model, (batch[0] - 0.3) / 0.2, batch[1], BALL))
    assert (outside["inputs"], outside["normalisation"]) == ("bad", "good")
    assert "ascent" not in outside  # an attack would mean nothing
    (found,) = (each for each in inspect(model, *batch, BALL) if each.check == "normalisation")
    assert found.verdict == "bad" and "heuristic" in found.text, found


def test_an_untrained_model_is_no_better_than_chance(batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(2)
    found = suspicious(inspect(cnn(), *batch, BALL))
    assert found.get("normalisation") == "look"


def test_gradients_that_end_in_a_saturated_layer(sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor]) -> None:
    """Masked gradients: flat around the images, so that neither steps nor a large ball lead anywhere."""
    flat = Around(sound["natural"], before=lambda x: torch.sigmoid(400 * (x - 0.5)))
    found = suspicious(inspect(flat, *batch, BALL))
    assert found.get("budget") in ("look", "bad"), found


@pytest.mark.parametrize(("share", "verdict"), [(0.48, "good"), (0.52, "look")])
def test_a_loss_that_falls_by_more_than_half_of_its_rise_is_worth_a_look(share: float, verdict: str) -> None:
    """Three falls, the last within the ten steps of a usual attack; what comes later does not count."""
    fall = share / 3
    path = [0, 1, 1 - fall, 1, 1 - fall, 1, 1, 1, 1 + fall, 1 + fall, 1]
    assert _ascent([*path, *range(30)]).verdict == verdict


class Linear(nn.Module):
    """Two classes, divided by the mean of the pixels."""

    def forward(self, x: Tensor) -> Tensor:
        margin = x.flatten(1).mean(1) - 0.5
        return 10 * torch.stack([-margin, margin], 1)


@pytest.mark.parametrize(("slow", "verdict"), [(19, "good"), (21, "look")])
def test_images_that_only_a_long_attack_fools_are_worth_a_look_beyond_a_fifth(slow: int, verdict: str) -> None:
    """Where only the very end of the gradient's direction is beyond the border, ascent turns towards it slowly."""
    ball = Ball(0.8, "l2")
    reach = ball.epsilon / 8  # of 64 pixels, in the mean
    margins = torch.full((100,), 0.2 * reach)
    margins[:slow] = 0.999 * reach
    images = (0.5 - margins)[:, None, None, None].expand(-1, 1, 8, 8)
    (steps,) = (f for f in inspect(Linear(), images, torch.zeros(100, dtype=torch.long), ball) if f.check == "steps")
    assert f"10 steps fool {100 - slow}% of the images and 40 steps 100%" in steps.text
    assert steps.verdict == verdict


class Faulty(nn.Module):
    """Two classes, divided by the mean of the pixels; by something else for images whose first pixel is bright."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault
        self.border = nn.Parameter(torch.tensor(0.45).double())  # so that rounding hides no small change

    def forward(self, x: Tensor) -> Tensor:
        first, rest = x.flatten(1)[:, 0], x.flatten(1)[:, 1:]
        margin = torch.where(first > 0.5, self.fault(rest), rest.mean(1) - self.border)
        return 10 * torch.stack([-margin, margin], 1)


def dark(level: float, faulty: int) -> tuple[Tensor, Tensor]:
    """A hundred images of the first class, of which some meet the fault."""
    images = torch.full((100, 1, 16, 16), level)
    images[:, :, 0, 0] = 0
    images[:faulty, :, 0, 0] = 1
    return images, torch.zeros(100, dtype=torch.long)


def masked(rest: Tensor) -> Tensor:
    return rest.detach().mean(1) - 0.45


def fooled_by_noise(rest: Tensor) -> Tensor:
    """Corners of the ball are further away in the mean than its other points."""
    return (rest.detach() - 0.4).abs().mean(1) - 0.75 * BALL.epsilon


# The check that a fault on some of a hundred images sets off, and by how many images it is good and worth a look.
LIMITS: dict[str, tuple[Callable[[Tensor], Tensor], str, int, int]] = {
    "quantised": (lambda rest: torch.round(8 * rest.mean(1)) / 8 - 0.45, "preprocessing", 10, 50),
    "backwards": (lambda rest: Backwards.apply(rest).mean(1) - 0.45, "preprocessing", 20, 50),
    "confident": (lambda rest: 1000 * (rest.mean(1) - 0.45), "vanishing", 1, 5),
    "noise": (fooled_by_noise, "noise", 1, 5),
}


@pytest.mark.parametrize("name", LIMITS)
def test_how_many_images_a_fault_must_spoil_to_be_reported(name: str) -> None:
    fault, check, good, look = LIMITS[name]
    expected = {good: "good", good + 1: "look", look: "look", look + 1: "bad"}
    model = Faulty(fault)
    assert {count: verdicts(inspect(model, *dark(0.4, count), BALL))[check] for count in expected} == expected


@pytest.mark.parametrize(
    ("faulty", "firm", "verdict"), [(5, 0, "good"), (6, 0, "bad"), (0, 5, "good"), (0, 6, "look"), (5, 1, "look")]
)
def test_images_that_hold_out_in_a_large_ball_are_suspicious_beyond_a_twentieth(
    faulty: int, firm: int, verdict: str
) -> None:
    """Grey fools those without a gradient; firm ones are so bright that nothing in the ball does."""
    images, labels = dark(0.3, faulty)
    images[100 - firm :, :, 1:], labels[100 - firm :] = 1, 1
    (budget,) = (f for f in inspect(Faulty(masked), images, labels, BALL) if f.check == "budget")
    assert f"leaves {faulty + firm} of 100 images right" in budget.text
    assert budget.verdict == verdict


def test_bytes_and_more_images_than_are_needed(sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor]) -> None:
    part = registry.load("digits").test
    findings = inspect(sound["robust"], part.images, part.labels, BALL)
    assert suspicious(findings) == {}
    assert any("of 128 images" in each.text or "of 12" in each.text for each in findings)


def test_nothing_to_inspect(sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    with pytest.raises(RecipeError, match="epsilon 0"):
        inspect(sound["robust"], x, y, Ball(0.0))
    with pytest.raises(DataError, match="no images"):
        inspect(sound["robust"], x[:0], y[:0], BALL)
    wrong = (sound["robust"](x).argmax(1) + 1) % 10
    assert suspicious(inspect(sound["robust"], x, wrong, BALL)).get("accuracy") == "look"
    assert suspicious(inspect(sound["robust"], x, y + 5, BALL)) == {"logits": "bad"}


def test_a_model_that_can_not_be_copied_is_put_back(
    sound: dict[str, nn.Module], batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stateful(sound["robust"])

    def refuse(self: nn.Module, memo: Any) -> Any:
        raise RuntimeError("no copies")

    monkeypatch.setattr(Stateful, "__deepcopy__", refuse, raising=False)
    assert verdicts(inspect(model, *batch, BALL))["state"] == "bad"
    assert model.calls == 0
