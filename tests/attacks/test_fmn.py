"""FMN: exact distances of linear models, foolbox's distances, and never a distance that was not found."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harp.attacks import Fmn, named
from harp.attacks.batched import Packing
from harp.attacks.fast_forward import frozen
from harp.errors import RecipeError
from support.attacking import assert_untouched, snapshot
from support.distances import NORMS, length, linear, robust, slow_way, toy


@pytest.fixture(scope="module")
def four() -> tuple[nn.Module, Tensor, Tensor]:
    return toy(4)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("edge", (False, True), ids=("inside", "at the edge"))
def test_distances_of_a_linear_model(norm: str, edge: bool) -> None:
    """Never below the exact distance in the box, and close above it."""
    x = torch.rand(24, 1, 5, 5) if edge else 0.5 + 0.02 * torch.randn(24, 1, 5, 5)
    weights = torch.randn(2, 25)
    model = linear(weights, torch.zeros(2), (1, 5, 5))
    with torch.no_grad():
        answer = model(x)
    y, lead = answer.argmax(1), answer.amax(1) - answer.amin(1)
    ways = [
        slow_way(image.flatten(), weights[1 - label] - weights[label], -float(gap), norm)
        for image, label, gap in zip(x, y, lead, strict=True)
    ]
    exact = length(torch.stack(ways), norm).float()
    found = Fmn(norm=norm, steps=200).distances(model, x, y)
    assert bool((found >= exact * (1 - 1e-4)).all())
    assert bool((found <= exact * 1.003 + 1e-5).all())


@pytest.mark.parametrize("norm", NORMS)
def test_a_step_is_that_of_the_paper(norm: str) -> None:
    """Algorithm 1 at the first step, for points on either side of the boundary, with and without one found before."""
    slope = torch.tensor([1.0, -2.0, 3.0, 0.5])
    model = linear(torch.stack([slope, torch.zeros(4)]), torch.tensor([-1.25, 0.0]), (4,))  # z_0 is zero at 0.5
    x = (0.5 + 0.05 * slope.sign()).repeat(6, 1)
    y = torch.zeros(6, dtype=torch.long)
    attack = Fmn(norm=norm, steps=10, alpha=0.01, gamma=0.05)
    with torch.no_grad():
        state = attack.begin(model, x, y, model(x), torch.Generator())
        far = torch.tensor([0.02, 0.02, 0.02, 0.1, 0.1, 0.1])
        current = x - far[:, None] * slope.sign()
        margin = current @ slope - 1.25
        here = length(current - x, norm)
        assert (margin < 0).tolist() == [False] * 3 + [True] * 3
        before = torch.tensor([math.inf, math.inf, 0.3, math.inf, 0.05, math.inf])  # the nearest points so far
        radius = torch.tensor([0.01, 0.4, 0.04, 1.0, 1.0, 0.01])
        state |= {"current": current.clone(), "nearest": before.clone(), "radius": radius.clone()}
        attack.advance(model, x, y, state, torch.Generator())
    guess = here + margin.abs() / torch.linalg.vector_norm(slope, 1 if norm == "linf" else 2)
    wanted = [
        guess[0],  # none before: to the linearised boundary
        0.4 * 1.05,  # but never a smaller ball than before
        0.04 * 1.05,  # one before: grow
        here[3],  # beyond: no farther than this point, even in a much larger ball
        0.05,  # nor than the nearest before
        0.01 * 0.95,  # shrink
    ]
    assert float(guess[1]) < 0.4 * 1.05 and float(here[5]) > 0.01
    assert state["radius"].tolist() == pytest.approx([float(number) for number in wanted], rel=1e-5)
    nearest = [math.inf, math.inf, 0.3, here[3], 0.05, here[5]]
    assert state["nearest"].tolist() == pytest.approx([float(number) for number in nearest], rel=1e-5)
    step = current - x - 0.01 * slope / slope.norm()
    limits = torch.tensor([float(number) for number in wanted])[:, None]
    shorter = (limits / step.norm(dim=1, keepdim=True)).clamp_max(1)
    inside = step.clamp(-limits, limits) if norm == "linf" else step * shorter
    assert torch.allclose(state["current"] - x, inside, atol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("classes", (2, 4, 10))
def test_against_foolbox(classes: int, norm: str) -> None:
    """In the maximum norm with foolbox's first step the same distances, else none that are larger.

    In the Euclidean norm foolbox's projection does nothing, and its distances are about twice ours.
    """
    foolbox = pytest.importorskip("foolbox")
    model, x, y = toy(classes)
    attack = {"linf": foolbox.attacks.LInfFMNAttack, "l2": foolbox.attacks.L2FMNAttack}[norm](steps=40)
    _, points, ok = attack(foolbox.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=None)
    right = robust(model, x, y)
    theirs = length(points - x, norm).masked_fill(~ok, math.inf).masked_fill(~right, 0)
    same = Fmn(norm=norm, steps=40, alpha=1.0).distances(model, x, y)
    ours = Fmn(norm=norm, steps=40).distances(model, x, y)
    if norm == "linf":
        assert int(torch.isclose(same, theirs, rtol=0.02).sum()) >= 0.9 * len(x)
    for distance in (same, ours):
        assert float(distance[right].median()) <= 1.03 * float(theirs[right].median())
        assert int((distance > 1.1 * theirs).sum()) <= 0.1 * len(x)


@pytest.mark.parametrize("norm", NORMS)
def test_points_are_at_the_distances(four: tuple[nn.Module, Tensor, Tensor], norm: str) -> None:
    model, x, y = four
    attack = Fmn(norm=norm, steps=15)
    distance, points = attack.distances(model, x, y), attack(model, x, y)
    right, broken = robust(model, x, y), distance.isfinite()
    assert 0 < int(right.sum()) < len(x)
    assert torch.equal(distance == 0, ~right)
    assert torch.equal(length(points - x, norm)[broken], distance[broken])
    assert int((~robust(model, points, y) != broken).sum()) <= 2  # so near to the boundary that rounding decides
    assert float(points.min()) >= 0 and float(points.max()) <= 1


@pytest.mark.parametrize("norm", NORMS)
def test_the_box_does_not_keep_it_from_the_boundary(norm: str) -> None:
    """Half of the pixels can't follow the gradient: a ball that grows by the distance alone would stop on the way."""
    x = torch.full((2, 16), 0.5)
    x[:, :8] = 1
    model = linear(torch.stack([torch.zeros(16), torch.ones(16)]), torch.tensor([14.0, 0.0]), (16,))
    exact = 0.25 if norm == "linf" else 0.25 * math.sqrt(8)
    found = Fmn(norm=norm, steps=100).distances(model, x, torch.zeros(2, dtype=torch.long))
    assert found.tolist() == pytest.approx([exact] * 2, rel=3e-3)


def test_the_distance_is_infinite_if_no_point_is_found() -> None:
    """A constant network has no boundary: not a distance of zero."""
    model = linear(torch.zeros(3, 16), torch.tensor([1.0, 0.0, 0.0]), (16,))
    x, y = torch.rand(4, 16), torch.tensor([0, 0, 0, 1])
    for norm in NORMS:
        assert Fmn(norm=norm, steps=5).distances(model, x, y).tolist() == [math.inf] * 3 + [0]
        for epsilon in (math.inf, 0.3):
            attack = Fmn(epsilon, norm, steps=5)
            assert torch.equal(attack(model, x, y), x)
            packing = Packing(attack, model, x, y, batch=4, seed=0)
            packing.run()
            assert packing.fooled.tolist() == [False] * 3 + [True]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fast", (True, False))
def test_within_a_ball(four: tuple[nn.Module, Tensor, Tensor], norm: str, fast: bool) -> None:
    """Fooled where the distance is at most epsilon; all else is given back. The model does not notice."""
    model, x, y = four
    distance = Fmn(norm=norm, steps=30, fast=fast).distances(model, x, y)
    epsilon = float(distance[distance > 0].median())
    model.train()
    before, given = snapshot(model), x.clone()
    points = Fmn(epsilon, norm, 30, fast=fast)(model, x, y)
    assert_untouched(model, before)
    model.eval()
    assert torch.equal(x, given)
    assert float(length(points - x, norm).max()) <= epsilon + 1e-6
    assert float(points.min()) >= 0 and float(points.max()) <= 1
    held = robust(model, points, y)
    # The folded network differs by rounding, and points may be that near to the boundary.
    assert int((points[held] != x[held]).flatten(1).any(1).sum()) <= (2 if fast else 0)
    # Which points are visited does not depend on epsilon, only when an image leaves.
    assert int((held != (distance > epsilon)).sum()) <= 2


def test_a_larger_ball_fools_more(four: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = four
    left = [int(robust(model, Fmn(epsilon, steps=20)(model, x, y), y).sum()) for epsilon in (0.01, 0.05, 0.1, 0.5)]
    assert left == sorted(left, reverse=True) and left[0] > left[-1]


@pytest.mark.parametrize("norm", NORMS)
def test_more_steps_find_nearer_points(four: tuple[nn.Module, Tensor, Tensor], norm: str) -> None:
    model, x, y = four
    few, many = (Fmn(norm=norm, steps=steps).distances(model, x, y) for steps in (10, 80))
    assert float(many[many > 0].median()) < float(few[few > 0].median())


def test_a_batch_that_is_refilled_finds_the_same(four: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = four
    with frozen(model, x) as net, torch.no_grad():
        full, narrow = (Packing(Fmn(0.06, steps=10), net, x, y, batch=batch, seed=0) for batch in (64, 7))
        full.run()
        narrow.run()
    assert torch.equal(full.fooled, narrow.fooled)
    assert torch.allclose(full.points, narrow.points, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("epsilon", (math.inf, 0.08))
def test_a_saved_state_continues_to_the_same_bits(
    four: tuple[nn.Module, Tensor, Tensor], norm: str, epsilon: float, tmp_path: Any
) -> None:
    model, x, y = four
    attack, file = Fmn(epsilon, norm, steps=12), tmp_path / "state"
    with frozen(model, x) as net, torch.no_grad():
        whole = Packing(attack, net, x, y, batch=16, seed=3)
        whole.run(lambda: torch.save(whole.state(), file) if whole.ticks == 20 else None)
        assert whole.ticks > 20
        rest = Packing(attack, net, x, y, batch=16, seed=3)
        rest.load(torch.load(file, weights_only=True))
        assert not torch.equal(rest.points, whole.points) or not torch.equal(rest.fooled, whole.fooled)
        rest.run()
    assert torch.equal(rest.points, whole.points)
    assert torch.equal(rest.fooled, whole.fooled)


@pytest.mark.parametrize("norm", NORMS)
def test_logits_that_are_not_finite_are_wrong(norm: str) -> None:
    """Beyond a brightness the network breaks down: that is wrong, and the distance to there is found."""
    model = linear(torch.tensor([[0.0] * 9, [1.0] * 9]), torch.tensor([5.0, 0.0]), (9,))

    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            answer = model(x)
            return torch.where(x.mean(1, keepdim=True) > 0.53, torch.full_like(answer, math.nan), answer)

    x, y = torch.full((3, 9), 0.5), torch.zeros(3, dtype=torch.long)
    found = Fmn(norm=norm, steps=40).distances(Breaking(), x, y)
    exact = 0.03 if norm == "linf" else 0.09
    assert bool((found >= exact - 1e-6).all()) and bool((found <= 2 * exact).all())


def test_other_shapes_and_precisions(four: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = four
    assert Fmn().distances(model, x[:0], y[:0]).shape == (0,)
    assert Fmn(steps=3)(model, x[:0], y[:0]).shape == (0, 1, 8, 8)
    assert torch.equal(Fmn(0.0)(model, x, y), x)
    double = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double()
    assert Fmn(steps=3).distances(double, x.double(), torch.zeros_like(y)).dtype == torch.float64
    with torch.inference_mode():
        assert Fmn(steps=3).distances(model, x, y).shape == (64,)


@pytest.mark.parametrize(
    "fields", [{"norm": "l1"}, {"steps": 0}, {"alpha": -1}, {"gamma": math.nan}, {"epsilon": -1}, {"epsilon": "8"}]
)
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(fields))):
        Fmn(**fields)


def test_names() -> None:
    assert Fmn().name == "fmn-100" and named("fmn-20", norm="l2") == Fmn(norm="l2", steps=20)
