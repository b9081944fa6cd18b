"""AutoAttack: the parts in their order, each on what is left, and as strong as the package."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harp.attacks import Apgd, ApgdT, AutoAttack, AutoAttackLite, Square
from harp.attacks.batched import Packing, Stepwise
from harp.attacks.fab import Fab
from harp.errors import RecipeError
from harp.system.tensors import load_state, save_state
from support import cases
from support.attacking import BALLS, Calls, near_the_boundary, right, task, trained
from support.interruption import Enough

STEPS, QUERIES = 20, 100


@dataclass(frozen=True)
class Short(AutoAttack):
    """The ensemble with fewer steps."""

    def parts(self, classes: int) -> Sequence[Stepwise]:
        steps = {Square: QUERIES}
        return [replace(part, steps=steps.get(type(part), STEPS)) for part in super().parts(classes)]


def test_the_standard_ensemble() -> None:
    for norm in ("linf", "l2"):
        parts: list[Any] = list(AutoAttack(0.5, norm).parts(10))
        assert [type(part) for part in parts] == [Apgd, ApgdT, Fab, Square]
        assert [part.name for part in parts] == ["apgd-ce-100", "apgd-t-100", "fab-t-100", "square-5000"]
        assert all((part.epsilon, part.norm, part.restarts, part.fast) == (0.5, norm, 1, True) for part in parts)
        assert parts[1].targets == parts[2].targets == 9
        assert not parts[3].rescaled and parts[3].share == 0.8
    assert not any(part.fast for part in AutoAttack(fast=False).parts(10))


def test_autoattack_lite_is_the_first_two_attacks() -> None:
    assert list(AutoAttackLite(0.1).parts(10)) == list(AutoAttack(0.1).parts(10)[:2])
    assert "not AutoAttack" in (AutoAttackLite.__doc__ or "")
    assert (AutoAttack().name, AutoAttackLite().name) == ("autoattack", "aa-lite")
    with pytest.raises(RecipeError):
        AutoAttack(norm="l1")
    with pytest.raises(RecipeError):
        AutoAttackLite(-1.0)


@pytest.mark.parametrize(
    ("classes", "norm"), [(4, "linf"), (4, "l2"), pytest.param(10, "linf", marks=pytest.mark.slow)]
)
def test_as_strong_as_the_package(classes: int, norm: str) -> None:
    package = pytest.importorskip("pyautoattack")
    model, (x, y) = trained(classes), task(classes, 30)
    oracle = package.AutoAttack(model, norm={"linf": "Linf", "l2": "L2"}[norm], eps=BALLS[norm], seed=0)
    for part in (oracle.apgd, oracle.apgd_targeted, oracle.fab):
        part.n_iter = STEPS
    for part in (oracle.apgd, oracle.apgd_targeted):
        part.n_iter_2, part.n_iter_min, part.size_decr = (max(int(share * STEPS), 1) for share in (0.22, 0.06, 0.03))
    oracle.apgd_targeted.n_target_classes = oracle.fab.n_target_classes = min(9, classes - 1)
    oracle.square.n_queries = QUERIES
    tracer = sys.gettrace()
    theirs = right(model, oracle.run_standard_evaluation(x, y)[0], y)
    sys.settrace(tracer)  # the package removes the tracer that coverage has set
    torch.manual_seed(0)
    ours = right(model, Short(BALLS[norm], norm)(model, x, y), y)
    assert 0 < theirs.sum() < right(model, x, y).sum()
    assert (ours != theirs).sum() <= 1  # none of 30 in any pair of four seeds of both


def test_two_and_a_hundred_classes() -> None:
    for classes in (2, 100):
        model, (x, y) = trained(classes), task(classes, 12)
        alone = right(model, Apgd(0.04, steps=STEPS)(model, x, y), y)
        together = right(model, Short(0.04)(model, x, y), y)
        assert together.sum() <= alone.sum() + 1


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_closed_form_of_a_linear_model(norm: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 2)
    model = nn.Sequential(nn.Flatten(), layer)
    x = 0.4 + 0.2 * torch.rand(40, 1, 4, 6)
    with torch.no_grad():
        layer.bias -= model(x).mean(0)
        z, apart = model(x), layer.weight[0] - layer.weight[1]
        distance = (z[:, 0] - z[:, 1]).abs() / (apart.abs().sum() if norm == "linf" else apart.norm())
    y, epsilon = z.argmax(1), distance.median().item() + 1e-6
    robust = right(model, Short(epsilon, norm)(model, x, y), y)
    assert robust[distance > epsilon * (1 + 1e-5)].all()
    assert not robust[distance < 0.999 * epsilon].any()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_points_are_in_the_ball_and_the_box(norm: str) -> None:
    model, (x, y) = trained(4), task(4, 20)
    points = Short(BALLS[norm], norm)(model, x, y)
    offset = (points - x).flatten(1)
    size = offset.abs().amax(1) if norm == "linf" else offset.norm(dim=1)
    assert size.max() <= BALLS[norm] + 1e-6 and points.min() >= 0 and points.max() <= 1
    assert torch.equal(AutoAttack(0.0, norm)(model, x, y), x)
    assert AutoAttack()(model, x[:0], y[:0]).shape == (0, 1, 8, 8)
    assert Short(BALLS[norm], norm)(model, x[:1], y[:1]).shape == x[:1].shape


def test_each_attack_gets_the_images_that_are_left() -> None:
    model, (x, y) = trained(4), task(4, 30)
    tried: list[tuple[str, int]] = []

    class Counted(Apgd):
        def begin(self, net: Any, x: Any, y: Any, clean: Any, generator: Any) -> Any:
            tried.append((self.norm, len(x)))
            return super().begin(net, x, y, clean, generator)

    @dataclass(frozen=True)
    class Twice(AutoAttack):
        def parts(self, classes: int) -> Sequence[Stepwise]:
            return [Counted(0.04, steps=10), Counted(0.3, "l2", steps=10)]

    natural = right(model, x, y)
    torch.manual_seed(0)
    robust = right(model, Twice(0.04)(model, x, y), y)
    assert tried[0] == ("linf", int(natural.sum()))
    assert tried[1][0] == "l2" and robust.sum() <= tried[1][1] < tried[0][1]


def test_a_point_counts_if_the_model_itself_is_wrong() -> None:
    """A part finds points that only the folded network gets wrong: the next part continues with these images."""
    model, near, y, apart = near_the_boundary()
    x = near + 0.2 * (1 - 2 * y)[:, None, None, None] * apart
    assert right(model, near, y).sum() > 20 and right(model, x, y).all()

    class Rounded(Apgd):
        def begin(self, net: Any, x: Any, y: Any, clean: Any, generator: Any) -> Any:
            return super().begin(net, x, y, clean, generator) | {"points": near.clone()}

        def advance(self, net: Any, x: Any, y: Any, state: Any, generator: Any) -> Any:
            assert (net(state["points"]).argmax(1) != y).sum() > 20
            return torch.ones_like(y, dtype=torch.bool), torch.ones_like(y, dtype=torch.bool)

    @dataclass(frozen=True)
    class Both(AutoAttack):
        def parts(self, classes: int) -> Sequence[Stepwise]:
            return [Rounded(self.epsilon), Apgd(self.epsilon, steps=10)]

    assert not right(model, Both(0.2)(model, x, y), y).any()


@pytest.mark.parametrize("attack", [Apgd(0.2, steps=10), ApgdT(0.2, steps=10), Square(0.2, steps=50), Short(0.2)])
def test_an_image_that_only_the_folded_network_gets_wrong_is_attacked(attack: Any) -> None:
    model, x, y, _ = near_the_boundary()
    assert right(model, x, y).all() and not right(model, attack(model, x, y), y).any()


def test_an_image_that_is_misclassified_is_not_attacked() -> None:
    model, (x, _) = Calls(trained(4)), task(4, 20)
    mistaken = (model(x).argmax(1) + 1) % 4
    model.sizes.clear()
    points = AutoAttack(0.1, fast=False)(model, x, mistaken)
    assert torch.equal(points, x) and sum(model.sizes) <= 1 + 20  # the number of classes, the clean logits


def test_the_model_is_unchanged_and_the_result_depends_on_the_seed() -> None:
    model, (x, y) = cases.build("conv"), cases.batch(8)
    model.train()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(Short(0.01)(model, x, y))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "at", [(1, 30), *(pytest.param(at, marks=pytest.mark.slow) for at in ((0, 7), (2, 20), (3, 50)))]
)
def test_a_caller_may_save_in_between(at: tuple[int, int], tmp_path: Path) -> None:
    model, (x, y) = trained(4), task(4, 14)
    parts = Short(0.04).parts(4)

    def attack(stop: tuple[int, int] | None, state: dict[str, Any] | None) -> Any:
        points, start = (x.clone(), 0) if state is None else (state["points"], state["part"])
        for number in range(start, len(parts)):
            left = right(model, points, y).nonzero().flatten()
            packing = Packing(parts[number], model, x[left], y[left], batch=5, seed=number)
            if state is not None and number == start:
                packing.load(state["packing"])

            def save(packing: Packing = packing, number: int = number) -> None:
                if (number, packing.ticks) == stop:
                    save_state(tmp_path / "state.pt", {"points": points, "part": number, "packing": packing.state()})
                    raise Enough

            packing.run(save)
            points[left] = packing.points
        return points

    whole = attack(None, None)
    with pytest.raises(Enough):
        attack(at, None)
    assert torch.equal(attack(None, load_state(tmp_path / "state.pt")), whole)
