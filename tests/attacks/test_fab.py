"""FAB: exact projections onto planes in the box, exact distances of linear models, and the authors' robust sets."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.attacks import Fab, named
from harp.attacks.batched import Packing
from harp.attacks.fab import to_plane
from harp.attacks.fast_forward import frozen
from harp.errors import RecipeError
from support.attacking import assert_untouched, drawn_from, snapshot
from support.distances import NORMS, length, linear, robust, slow_way, toy


@pytest.fixture(scope="module", params=(2, 4, 10))
def trained(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    return toy(request.param)


@pytest.fixture(scope="module")
def four() -> tuple[nn.Module, Tensor, Tensor]:
    return toy(4)


# ------------------------------------------------------------------ the projection

pixel = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32))
weight = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-2, 2, width=32).filter(lambda w: abs(w) > 1e-3))


@given(
    st.lists(st.tuples(pixel, weight), min_size=1, max_size=24),
    st.floats(-4, 4, width=32),
    st.sampled_from(NORMS),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_projection_is_the_one_by_sorting(
    pixels: list[tuple[float, float]], value: float, norm: str, dtype: torch.dtype
) -> None:
    x, slope = (torch.tensor(column, dtype=dtype) for column in zip(*pixels, strict=True))
    way = to_plane(x[None], slope[None], torch.tensor([value], dtype=dtype), norm)[0]
    assert way.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert torch.allclose(way.double(), slow_way(x, slope, value, norm), rtol=0, atol=tolerance * 1e2 ** (norm == "l2"))
    assert float((x + way).min()) >= -1e-6 and float((x + way).max()) <= 1 + 1e-6
    assert not way[slope == 0].any()
    left, best = value + float(slope @ way), float((slope.abs() * torch.where(slope * value < 0, 1 - x, x)).sum())
    if best >= abs(value):
        assert abs(left) <= 1e-4
    else:  # the corner that is nearest
        assert abs(left) == pytest.approx(abs(value) - best, abs=1e-4)


@given(st.integers(0, 2**31), st.sampled_from(NORMS))
def test_no_other_point_of_the_plane_is_nearer(seed: int, norm: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, slope = torch.rand(10, generator=generator).double(), torch.randn(10, generator=generator).double()
    others = torch.rand(200, 10, generator=generator).double()
    values = 0.7 + (others - x) @ slope
    crossing = values < 0
    points = x + (others[crossing] - x) * (0.7 / (0.7 - values[crossing]))[:, None]  # where a segment meets the plane
    assert torch.allclose(0.7 + (points - x) @ slope, torch.zeros(len(points)).double(), atol=1e-9)
    way = to_plane(x[None], slope[None], torch.tensor([0.7]).double(), norm)
    assert bool((length(points - x, norm) >= float(length(way, norm)) - 1e-9).all())


@pytest.mark.parametrize("norm", NORMS)
def test_rows_are_projected_by_themselves(norm: str) -> None:
    x, slope, value = torch.rand(9, 3, 4, 4), torch.randn(9, 3, 4, 4), torch.randn(9) * 4
    together = to_plane(x, slope, value, norm)
    alone = torch.cat([to_plane(x[i : i + 1], slope[i : i + 1], value[i : i + 1], norm) for i in range(9)])
    assert together.shape == x.shape
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_the_authors_projection_agrees(norm: str) -> None:
    projections = pytest.importorskip("pyautoattack.fab_projections")
    x = torch.rand(32, 300)
    x[torch.rand_like(x) < 0.3] = 0
    slope = torch.randn(32, 300) * torch.randn(32, 300).exp()
    value = torch.linspace(-0.4, 0.4, 32) * slope.abs().sum(1)
    theirs = getattr(projections, f"projection_{norm}")(x, slope, (slope * x).sum(1) - value)
    assert torch.allclose(to_plane(x, slope, value, norm), theirs, atol=2e-5)


# ------------------------------------------------------------------ linear models


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("edge", (False, True), ids=("inside", "at the edge"))
def test_distances_of_a_linear_model(norm: str, edge: bool) -> None:
    """Two classes: fooled just above the exact distance to the boundary in the box, not just below."""
    x = torch.rand(10, 1, 5, 5) if edge else 0.5 + 0.02 * torch.randn(10, 1, 5, 5)
    if edge:
        x[torch.rand_like(x) < 0.3] = 0
    weights, bias = torch.randn(2, 25), torch.zeros(2)
    model = linear(weights, bias, (1, 5, 5))
    with torch.no_grad():
        answer = model(x)
    y, lead = answer.argmax(1), answer.amax(1) - answer.amin(1)
    exact = torch.empty(10)
    for i in range(10):
        slope = weights[1 - y[i]] - weights[y[i]]
        way = slow_way(x[i].flatten(), slope, -float(lead[i]), norm)
        exact[i] = length(way[None], norm)[0]
        assert -float(lead[i]) + float(slope.double() @ way) == pytest.approx(0, abs=1e-4)  # it can be reached
        if not edge:
            dual = 1 if norm == "linf" else 2
            assert float(exact[i]) == pytest.approx(float(lead[i] / torch.linalg.vector_norm(slope, dual)), rel=1e-4)
    for i in range(10):
        for factor, fooled in ((1.01, True), (0.999, False)):
            attack = Fab(float(exact[i]) * factor, norm, steps=10)
            point = attack(model, x[i : i + 1], y[i : i + 1])
            assert bool(robust(model, point, y[i : i + 1])) != fooled


def test_gradients_that_are_tiny_are_followed() -> None:
    """A logit that is far too small to square: the distance is that of the same model at any scale."""
    weights = torch.randn(2, 25)
    weights -= weights.mean(1, keepdim=True)
    x = 0.5 + 0.02 * torch.randn(16, 25)
    plain, tiny = (linear(weights * scale, torch.zeros(2), (25,)) for scale in (1, 1e-25))
    y = plain(x).argmax(1)
    for norm, epsilon in (("linf", 0.004), ("l2", 0.02)):
        attack = Fab(epsilon, norm, steps=5)
        one, other = (robust(model, attack(model, x, y), y) for model in (plain, tiny))
        assert torch.equal(one, other)
        assert 0 < int(one.sum()) < 16


# ------------------------------------------------------------------ the attack


@pytest.mark.parametrize("norm", NORMS)
def test_against_the_authors_code(trained: tuple[nn.Module, Tensor, Tensor], norm: str) -> None:
    """The robust sets are the same but for a few images, and ours is not the larger one by more than one image."""
    reference = pytest.importorskip("pyautoattack.fab_pt")
    model, x, y = trained
    classes = model(x[:1]).shape[1]
    epsilon = {2: {"linf": 0.12, "l2": 0.8}, 4: {"linf": 0.06, "l2": 0.45}, 10: {"linf": 0.04, "l2": 0.25}}[classes][
        norm
    ]
    targets = min(9, classes - 1)
    theirs = reference.FABAttack_PT(
        model, {"linf": "Linf", "l2": "L2"}[norm], 1, 20, epsilon, targeted=True, n_target_classes=targets
    )
    one = robust(model, Fab(epsilon, norm, steps=20)(model, x, y), y)
    other = robust(model, theirs.perturb(x, y), y)
    assert 0.1 * len(x) < int(other.sum()) < 0.9 * int(robust(model, x, y).sum())  # there is something to find, or not
    assert int((one & ~other).sum()) <= 1
    assert int((one != other).sum()) <= 4


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fast", (True, False))
def test_ball_box_and_the_model_untouched(four: tuple[nn.Module, Tensor, Tensor], norm: str, fast: bool) -> None:
    model, x, y = four
    model.train()
    before, given = snapshot(model), x.clone()
    epsilon = 0.06 if norm == "linf" else 0.45
    points = Fab(epsilon, norm, steps=10, fast=fast)(model, x, y)
    assert_untouched(model, before)
    assert torch.equal(x, given)
    model.eval()
    assert float(length(points - x, norm).max()) <= epsilon + 1e-6
    assert float(points.min()) >= 0 and float(points.max()) <= 1
    held = robust(model, points, y)
    # The folded network differs by rounding, and points may be that near to the boundary.
    assert int((points[held] != x[held]).flatten(1).any(1).sum()) <= (1 if fast else 0)
    assert 0 < int(held.sum()) < int(robust(model, x, y).sum())


def test_a_batch_that_is_refilled_finds_the_same(four: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = four
    attack = Fab(0.06, steps=8)
    with frozen(model, x) as net, torch.no_grad():
        full, narrow = (Packing(attack, net, x, y, batch=batch, seed=0) for batch in (64, 7))
        full.run()
        narrow.run()
    assert torch.equal(full.fooled, narrow.fooled)
    assert torch.allclose(full.points, narrow.points, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_a_saved_state_continues_to_the_same_bits(
    four: tuple[nn.Module, Tensor, Tensor], norm: str, tmp_path: Any
) -> None:
    model, x, y = four
    attack = Fab(0.05 if norm == "linf" else 0.35, norm, steps=6, restarts=2)
    file = tmp_path / "state"

    with frozen(model, x) as net, torch.no_grad():
        whole = Packing(attack, net, x, y, batch=16, seed=3)
        whole.run(lambda: torch.save(whole.state(), file) if whole.ticks == 19 else None)
        assert whole.ticks > 19
        rest = Packing(attack, net, x, y, batch=16, seed=3)
        rest.load(torch.load(file, weights_only=True))
        assert not torch.equal(rest.points, whole.points) or not torch.equal(rest.fooled, whole.fooled)
        rest.run()
    assert torch.equal(rest.points, whole.points)
    assert torch.equal(rest.fooled, whole.fooled)
    assert rest.ticks == whole.ticks


def test_counting_steps_targets_and_restarts() -> None:
    """A constant network is never fooled: every image takes all steps, towards all targets in their order."""
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    seen: list[Tensor] = []

    def net(x: Tensor) -> Tensor:
        return scores.expand(len(x), -1) + 0 * x.flatten(1).sum(1, keepdim=True)

    class Watched(Fab):
        def begin(self, *given: Any) -> Any:
            state = super().begin(*given)
            seen.append(state["targets"])
            return state

    attack = Watched(0.1, steps=3, restarts=2, targets=2)
    packing = Packing(attack, net, torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long), batch=2, seed=0)
    packing.run()
    assert torch.cat(seen).tolist() == [[2, 1]] * 5
    assert attack.longest(4) == 12 and packing.ticks == 36  # in batches of 2, 2 and 1
    assert not packing.fooled.any()
    assert attack.words(4) == "2 targets" and attack.words(2) == "1 target"


@pytest.mark.parametrize("norm", NORMS)
def test_restarts_find_what_one_run_does_not(norm: str) -> None:
    """No slope at the image itself: the first run stays there, a random start does not."""

    def net(x: Tensor) -> Tensor:
        far = (x.flatten(1) - 0.5).abs().sum(1) - 0.05
        return torch.stack([torch.zeros_like(far), torch.where(far > 0, far, far.detach().clamp_max(-0.01))], 1)

    x, y = torch.full((4, 1, 3, 3), 0.5), torch.zeros(4, dtype=torch.long)
    fooled = []
    for restarts in (1, 2):
        packing = Packing(Fab(0.2, norm, steps=3, restarts=restarts), net, x, y, batch=4, seed=0)
        packing.run()
        fooled.append(int(packing.fooled.sum()))
    assert fooled == [0, 4]


@pytest.mark.parametrize("norm", NORMS)
def test_a_restart_is_anywhere_at_half_of_epsilon(norm: str) -> None:
    """On the sphere in three dimensions a coordinate is uniform; on the cube all are but the largest, which is one."""

    def starts(x: Tensor) -> Tensor:
        attack = Fab(0.2, norm, steps=1, restarts=2)
        packing = Packing(attack, constant, x, torch.zeros(len(x), dtype=torch.long), batch=len(x), seed=0)
        seen: list[Tensor] = []
        packing.run(lambda: seen.append(packing.rows["current"].clone()))
        return seen[0]  # the first run is over after one step

    def constant(x: Tensor) -> Tensor:
        return torch.tensor([[1.0, 0.0]]).expand(len(x), -1) + 0 * x.flatten(1).sum(1, keepdim=True)

    x = torch.full((20_000, 1, 1, 3), 0.5)
    offset = (starts(x) - x).flatten(1) / 0.1
    assert torch.allclose(length(offset, norm), torch.ones(len(x)), atol=1e-5)
    for pixel in offset.T:
        assert drawn_from(lambda value: (1 + value) / 2, pixel[pixel.abs() < 1 - 1e-5] if norm == "linf" else pixel)
    assert float((offset.T @ offset / len(x)).fill_diagonal_(0).abs().max()) < 0.03
    corner = starts(torch.ones(100, 1, 1, 3))
    assert float(corner.max()) == 1 and float(corner.min()) >= 0.9 - 1e-6


def test_logits_that_are_not_finite_are_wrong() -> None:
    """Beyond a brightness the network breaks down: that is wrong, and no point or state is damaged by it."""
    model = linear(torch.tensor([[0.0] * 9, [1.0] * 9]), torch.tensor([5.0, 0.0]), (9,))

    def net(x: Tensor) -> Tensor:
        answer = model(x)
        return torch.where(x.mean(1, keepdim=True) > 0.53, torch.full_like(answer, math.nan), answer)

    x, y = torch.full((3, 9), 0.5), torch.zeros(3, dtype=torch.long)
    for epsilon, fooled in ((0.045, True), (0.02, False)):
        packing = Packing(Fab(epsilon, steps=12), net, x, y, batch=3, seed=0)
        packing.run(partial(_finite, packing))
        assert packing.fooled.tolist() == [fooled] * 3
        assert float((packing.points - x).abs().max()) <= epsilon + 1e-6


def _finite(packing: Packing) -> None:
    assert all(bool(rows.isfinite().all()) for rows in packing.rows.values())


def test_other_shapes_and_precisions(four: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = four
    attack = Fab(0.06, steps=3)
    assert attack(model, x[:0], y[:0]).shape == (0, 1, 8, 8)
    assert torch.equal(Fab(0.0)(model, x, y), x)
    double = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double()
    points = attack(double, x.double(), torch.zeros_like(y))
    assert points.dtype == torch.float64 and float((points - x.double()).abs().max()) <= 0.06 + 1e-6
    with torch.inference_mode():
        assert torch.equal(attack(model, x, y), attack(model, x, y))


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "l1"}, {"steps": 0}, {"targets": 0}, {"restarts": 0}, {"eta": 0.9}, {"beta": 1.5}, {"alpha_max": -1},
        {"alpha_max": 2}, {"epsilon": math.inf}, {"steps": 2.5},
    ],
)  # fmt: skip
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(fields))):
        Fab(**{"epsilon": 0.1, **fields})


def test_names() -> None:
    assert Fab(0.1).name == "fab-t-100" and named("fab-t-20x2", epsilon=0.1) == Fab(0.1, steps=20, restarts=2)
    assert named(Fab(0.1, restarts=3).name).name == "fab-t-100x3"
