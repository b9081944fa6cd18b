"""S2AP: the perturbation, what it does not change, and the methods that have it as an option."""

import copy

import pytest
import torch
from torch import nn

from harp.errors import ModelError, RecipeError
from harp.pruning.methods import Harp, HarpRates, HarpScores, Hydra
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases
from support.methods import KEEP, Memory, Three

RADIUS = 0.5


def sharp(case: str = "conv") -> tuple[nn.Module, Hydra]:
    model = cases.build(case)
    for module in model.modules():  # so that two passes over the same images agree
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    pruner = Hydra(Weights(model), KEEP, sharpness=RADIUS)
    pruner.trainable()
    pruner.start()
    return model, pruner


def test_without_a_radius_nothing_is_wrapped() -> None:
    objective = PgdTraining(steps=1)
    assert Hydra(Weights(cases.build("conv")), KEEP).wrap(objective) is objective


@pytest.mark.parametrize("case", ["conv", "residual", "transformer"])
def test_scores_move_along_their_gradient_by_the_radius_and_are_restored(case: str) -> None:
    model, pruner = sharp(case)
    x, y = cases.batch()
    before = [score.detach().clone() for score in pruner.scores]
    model.train()
    loss = Natural()(model, x, y)
    gradients = torch.autograd.grad(loss, pruner.units.weights, allow_unused=True)
    model.zero_grad()
    pruner.wrap(Natural())(model, x, y).backward()
    for score, old, dense, gradient in zip(pruner.scores, before, pruner.dense, gradients, strict=True):
        if gradient is not None:
            moved, slope = score.detach() - old, gradient * dense * old.sign()
            torch.testing.assert_close(moved.norm(), RADIUS * old.norm(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(moved / moved.norm(), slope / slope.norm(), rtol=1e-3, atol=1e-5)
    pruner.after_backward()
    assert all(torch.equal(score, old) for score, old in zip(pruner.scores, before, strict=True))


def test_processes_move_the_scores_along_the_sum_of_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def moves() -> list[torch.Tensor]:
        model, pruner = sharp()
        before = [score.detach().clone() for score in pruner.scores]
        pruner.wrap(Natural())(model.eval(), *cases.batch())
        return [score.detach() - old for score, old in zip(pruner.scores, before, strict=True)]

    alone = moves()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient: gradient.mul_(-2))  # others have -3 times it
    for move, other in zip(alone, moves(), strict=True):
        torch.testing.assert_close(other, -move)


def test_the_gradient_is_that_of_the_perturbed_masks() -> None:
    model, pruner = sharp()
    x, y = cases.batch()
    pruner.wrap(Natural())(model, x, y).backward()
    perturbed = [score.detach().clone() for score in pruner.scores]
    masks = pruner.current()
    pruner.after_backward()
    twin, other = sharp()
    with torch.no_grad():
        for score, value in zip(other.scores, perturbed, strict=True):
            score.copy_(value)
    other.write(masks)
    Natural()(twin, x, y).backward()
    other.after_backward()
    for mine, theirs in zip(pruner.scores, other.scores, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_batch_norms_take_statistics_of_one_pass() -> None:
    model, pruner = sharp()
    twin = copy.deepcopy(model)
    x, y = cases.batch()
    pruner.wrap(Natural())(model, x, y)
    norm, plain = (next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d)) for net in (model, twin))
    twin(x)
    assert int(norm.num_batches_tracked) == int(plain.num_batches_tracked) == 1


def test_images_are_attacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pruner = sharp()
    attacked = []
    attack = PgdTraining.attack
    monkeypatch.setattr(PgdTraining, "attack", lambda self, *args: attacked.append(1) or attack(self, *args))
    pruner.wrap(PgdTraining(steps=1))(model, *cases.batch())
    assert attacked == [1]


@pytest.mark.parametrize("method", [Hydra, Harp, HarpScores])
def test_sharpness_is_an_option_of_every_method_that_learns_scores(method: type[Hydra]) -> None:
    def answer(radius: float, keeper: Memory | None = None) -> list[torch.Tensor]:
        model = cases.build("residual")
        pruner = method(Weights(model), keep=KEEP, sharpness=radius)
        fit(model, Three(), PgdTraining(steps=1), pruner, epochs=2, lr=0.5, keeper=keeper, accumulate=2)
        return [score.detach().clone() for score in pruner.scores]

    plain, moved = answer(0.0), answer(0.3)
    assert any(not torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    stopped = Memory(stop_after=2)
    with pytest.raises(InterruptedError):
        answer(0.3, stopped)
    assert all(torch.equal(a, b) for a, b in zip(answer(0.3, Memory(state=stopped.state)), moved, strict=True))


def test_sharpness_without_scores_or_attack_is_refused() -> None:
    units = Weights(cases.build("conv"))
    with pytest.raises(RecipeError, match="learns no scores"):
        HarpRates(units, keep=KEEP, sharpness=0.1)
    with pytest.raises(RecipeError, match="radius"):
        Hydra(units, KEEP, sharpness=-1.0)
    with pytest.raises(ModelError, match="attack"):
        Hydra(units, KEEP, sharpness=0.1).wrap(lambda model, x, y, forward=None: model(x).sum())
    with pytest.raises(ModelError, match="attack"):
        Hydra(units, KEEP, sharpness=0.1).attach(torch.optim.SGD(units.weights, lr=0.1))
