"""Evaluation: counts, intervals, and a number that depends on nothing but what it says."""

import copy
import json
import math
import platform
import random

import pytest
import torch
from torch import Tensor, nn

import harp
from harp.attacks import Pgd
from harp.errors import DataError, ModelError, RecipeError
from harp.evaluation.confidence import wilson
from harp.evaluation.score import Score, accuracy, subset
from support import cases


def score(correct: tuple[int, ...], totals: tuple[int, ...]) -> Score:
    return Score("clean", correct, totals)


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (500, 1000, 0.4691, 0.5309)],
)
def test_wilson(correct: int, n: int, low: float, high: float) -> None:
    assert score((correct,), (n,)).interval() == pytest.approx((low, high), abs=5e-5)


def test_balanced() -> None:
    result = score((90, 5, 0), (100, 10, 0))
    assert result.n == 110 and result.accuracy == pytest.approx(95 / 110)
    assert result.per_class[:2] == (0.9, 0.5) and result.per_class[2] != result.per_class[2]
    assert result.balanced_accuracy == pytest.approx(0.7)
    (low, high), (low2, high2) = wilson(0.9, 100), wilson(0.5, 10)
    below, above = math.hypot(0.9 - low, 0.5 - low2) / 2, math.hypot(high - 0.9, high2 - 0.5) / 2
    assert result.interval(balanced=True) == pytest.approx((0.7 - below, 0.7 + above))
    assert score((8,), (10,)).interval(balanced=True) == pytest.approx(score((8,), (10,)).interval())


@pytest.mark.parametrize("correct", [(10, 20), (0, 0), (10, 0)])
def test_the_balanced_interval_has_a_width_if_every_class_is_all_right_or_all_wrong(correct: tuple[int, int]) -> None:
    low, high = score(correct, (10, 20)).interval(balanced=True)
    value = score(correct, (10, 20)).balanced_accuracy
    assert 0 <= low <= value <= high <= 1 and high - low > 0.05
    wide, narrow = (
        (b - a)
        for a, b in (
            score(correct, (10, 20)).interval(True),
            score((1000 * correct[0], 1000 * correct[1]), (10_000, 20_000)).interval(True),
        )
    )
    assert narrow < wide / 10


def test_intervals_cover_the_true_accuracy() -> None:
    generator = random.Random(0)
    covered = 0
    for _ in range(1000):
        low, high = score((sum(generator.random() < 0.6 for _ in range(50)),), (50,)).interval()
        covered += low <= 0.6 <= high
    assert 925 <= covered <= 975


def test_balanced_intervals_cover_the_true_accuracy() -> None:
    generator = random.Random(0)
    shares, totals, covered = (0.98, 0.7, 0.02), (40, 25, 15), 0
    for _ in range(1000):
        correct = [sum(generator.random() < share for _ in range(n)) for share, n in zip(shares, totals, strict=True)]
        low, high = Score("clean", tuple(correct), totals).interval(balanced=True)
        covered += low <= sum(shares) / 3 <= high
    assert 930 <= covered <= 985


def undecided(images: Tensor) -> nn.Module:
    model = cases.build("conv").eval()
    with torch.no_grad():
        model.classifier[-1].bias -= model(images).mean(0)
    return model.train()


def test_counts_are_those_of_the_model() -> None:
    images, labels = cases.batch(50)
    model = undecided(images)
    predicted = copy.deepcopy(model).eval()(images).argmax(1)
    result = accuracy(model, images, labels, batch=16)
    for label in range(4):
        assert result.correct[label] == ((predicted == label) & (labels == label)).sum()
        assert result.totals[label] == (labels == label).sum()
    assert result.name == "clean"
    assert accuracy(model, images, labels, num_classes=6).totals == (*result.totals, 0, 0)


def test_bytes_are_divided_by_255() -> None:
    data = (cases.batch(40)[0] * 255).byte()
    model, labels = undecided(data / 255), cases.batch(40)[1]
    assert accuracy(model, data, labels).correct == accuracy(model, data / 255, labels).correct
    assert accuracy(model.double(), data, labels).n == 40


def test_model_and_random_state_are_left_alone() -> None:
    images, labels = cases.batch(20)
    model = undecided(images)
    model.features[1].eval()
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    before = torch.get_rng_state()
    accuracy(model, images, labels, attack=Pgd(0.05, steps=2), batch=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_result_depends_on_the_seed_alone() -> None:
    images, labels = cases.batch(48)
    model = undecided(images)
    drawn: list[float] = []

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        drawn.append(torch.rand(()).item())
        return x

    for seed in (0, 0, 1):
        torch.manual_seed(len(drawn))
        accuracy(model, images, labels, attack=attack, batch=16, seed=seed)
    assert drawn[:3] == drawn[3:6] and len(set(drawn)) == 6


def test_robust_accuracy_is_monotone_in_epsilon() -> None:
    images = cases.batch(64)[0]
    model = undecided(images)
    labels = copy.deepcopy(model).eval()(images).argmax(1)
    found = [
        accuracy(model, images, labels, attack=Pgd(epsilon, epsilon / 4, 8)).accuracy
        for epsilon in (0.0, 0.005, 0.02, 0.08)
    ]
    assert found[0] == 1.0 == accuracy(model, images, labels).accuracy
    assert found == sorted(found, reverse=True) and found[-1] < 0.5


def test_what_an_attack_returns_is_classified_by_the_plain_model() -> None:
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = cases.build("conv"), []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append((len(x), self.training, torch.is_grad_enabled()))
            return self.inner(x)

    model, (images, labels) = Recorder(), cases.batch(12)
    accuracy(model, images, labels, attack=lambda model, x, y: x, batch=8)
    assert model.calls == [(1, False, False), (8, False, False), (4, False, False)]


def test_as_dict_says_what_the_number_depends_on() -> None:
    images, labels = cases.batch(10)
    attack = Pgd(0.1, steps=3, restarts=2)
    result = accuracy(undecided(images), images, labels, attack=attack, seed=7).as_dict()
    assert result["name"] == "pgd-3x2" and result["n"] == 10 and result["seed"] == 7
    assert result["attack"]["epsilon"] == 0.1 and result["attack"]["norm"] == "linf"
    versions = {"harp": harp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert result["versions"] == versions
    assert json.loads(json.dumps(result)) == result


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    images, labels = cases.batch(20)
    accuracy(undecided(images), images, labels, batch=8, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(8, 20), (16, 20), (20, 20)]


def test_answers_that_are_not_finite_are_wrong() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 4), float("nan"))

    images, labels = cases.batch(10)
    assert accuracy(Broken(), images, labels * 0).accuracy == 0


def test_invalid_input_is_refused() -> None:
    images, labels = cases.batch(10)
    model = undecided(images)
    for x, y in ((images[:0], labels[:0]), (images, labels[:5]), (images, labels + 4), (images, labels - 5)):
        with pytest.raises(DataError):
            accuracy(model, x, y)
    with pytest.raises(DataError):
        accuracy(model, images.long(), labels)
    with pytest.raises(DataError):
        accuracy(model, images, labels.clamp_min(2), num_classes=2)
    with pytest.raises(DataError):
        accuracy(model, images * 255, labels, attack=Pgd())
    with pytest.raises(RecipeError):
        accuracy(model, images, labels, batch=0)
    with pytest.raises(ModelError):
        accuracy(nn.Identity(), images, labels)


def test_subset() -> None:
    drawn = subset(1000, 100, 3)
    assert torch.equal(drawn, subset(1000, 100, 3)) and not torch.equal(drawn, subset(1000, 100, 4))
    assert len(set(drawn.tolist())) == 100 and drawn.tolist() == sorted(drawn.tolist()) and drawn.max() < 1000
    assert subset(5, 10, 0).tolist() == subset(5, None, 0).tolist() == [0, 1, 2, 3, 4]
    before = torch.get_rng_state()
    subset(10, 3, 0)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RecipeError):
        subset(10, 0, 0)
