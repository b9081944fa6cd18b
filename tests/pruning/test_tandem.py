"""Tandem: one pace for all scores, weights that follow their masks, counts that stay."""

import math

import pytest
import torch
from torch import nn

from harp.errors import RecipeError
from harp.pruning.allocation import allocate
from harp.pruning.methods import Tandem
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural
from support import cases
from support.methods import KEEP, train


def one_backward(pruner: Tandem) -> None:
    pruner.trainable()
    pruner.start()
    x, y = cases.batch()
    nn.functional.cross_entropy(pruner.units.model(x), y).backward()


@pytest.mark.parametrize("case", cases.CASES)
def test_every_layers_scores_move_by_the_same_share(case: str) -> None:
    pruner = Tandem(Weights(cases.build(case)), KEEP, pace=0.3)
    one_backward(pruner)
    pruner.after_backward()
    for score in pruner.scores:
        if score.grad is not None and score.grad.any():
            torch.testing.assert_close(score.grad.norm(), 0.3 * score.detach().norm())
            assert not score.grad.requires_grad, "a graph would grow with every step"


def test_the_direction_is_hydras() -> None:
    pruner = Tandem(Weights(cases.build("conv")), KEEP)
    one_backward(pruner)
    expected = [w.grad * d.detach() * s.sign() for w, d, s in _layers(pruner)]
    pruner.after_backward()
    for score, slope in zip(pruner.scores, expected, strict=True):
        cosine = torch.nn.functional.cosine_similarity(score.grad.reshape(-1), slope.detach().reshape(-1), dim=0)
        assert float(cosine) == pytest.approx(1.0, abs=1e-5)


def test_kept_weights_take_their_share_of_the_gradient_and_others_none() -> None:
    pruner = Tandem(Weights(cases.build("conv")), KEEP, share=0.25)
    one_backward(pruner)
    gradients = [weight.grad.clone() for weight in pruner.units.weights]
    masks = list(pruner.current().values())
    pruner.after_backward()
    for dense, gradient, mask in zip(pruner.dense, gradients, masks, strict=True):
        assert torch.equal(dense.grad, torch.where(mask, 0.25 * gradient, 0.0))


def test_a_layer_without_a_gradient_keeps_its_scores() -> None:
    model = cases.build("conv")
    nn.init.constant_(model.classifier[0].bias, -1e6)  # a dead ReLU: only the last layer's bias learns
    pruner = Tandem(Weights(model), KEEP)
    before = [score.detach().clone() for score in pruner.scores]
    one_backward(pruner)
    pruner.after_backward()
    for score in pruner.scores:
        assert score.grad is not None and not score.grad.any() and bool(torch.isfinite(score.grad).all())
    history = fit(model, [cases.batch()], Natural(), pruner, epochs=2, weight_decay=0.0).history
    assert all(math.isfinite(record["loss"]) for record in history)
    assert all(torch.equal(old, new) for old, new in zip(before, pruner.scores, strict=True))


def test_weights_train_only_with_a_share() -> None:
    for share in (0.0, 0.5):
        model = cases.build("conv")
        pruner = Tandem(Weights(model), KEEP, share=share)
        before = [dense.detach().clone() for dense in pruner.dense]
        train(model, pruner, 4)
        moved = [not torch.equal(old, new) for old, new in zip(before, pruner.dense, strict=True)]
        assert all(moved) if share else not any(moved)
        for weight, dense, mask in zip(pruner.units.weights, pruner.dense, pruner.current().values(), strict=True):
            assert torch.equal(weight, torch.where(mask, dense, 0.0))


@pytest.mark.parametrize(("keep", "share"), [(0.5, 1.0), (0.1, 1.0), (0.025, 0.5), (0.016, 0.4)])
def test_the_share_follows_from_the_budget(keep: float, share: float) -> None:
    assert Tandem(Weights(cases.build("conv")), keep).share == pytest.approx(share)


def test_counts_are_always_those_of_the_strategy() -> None:
    model = cases.build("residual")
    units = Weights(model)
    expected = allocate("blend", units, units.total(KEEP))
    pruner = Tandem(units, KEEP, reach=0.0)
    for _ in range(3):
        train(model, pruner, 2)
        assert [int(mask.sum()) for mask in pruner.masks().values()] == expected


@pytest.mark.parametrize("options", [{"pace": 0.0}, {"pace": -1.0}, {"share": -0.1}, {"share": float("inf")}])
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="give a positive number"):
        Tandem(Weights(cases.build("conv")), KEEP, **options)


def _layers(pruner: Tandem) -> list[tuple[nn.Parameter, nn.Parameter, torch.Tensor]]:
    return list(zip(pruner.units.weights, pruner.dense, (s.detach() for s in pruner.scores), strict=True))
