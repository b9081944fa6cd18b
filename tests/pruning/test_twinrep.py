"""TwinRep: gradients of both factors, one global cut, products under the mask at all moments."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harp.errors import RecipeError
from harp.models import build
from harp.pruning import masks as mask_ops
from harp.pruning.methods.base import Plan
from harp.pruning.methods.twinrep import TwinRep
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural
from support import cases


def begun(case: str = "conv", plan: Plan | None = None, **options: Any) -> tuple[TwinRep, torch.optim.Optimizer]:
    pruner = TwinRep(Weights(cases.build(case)), **{"keep": 0.1, **options})
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    pruner.bind(optimizer)
    pruner.start(plan)
    return pruner, optimizer


def step(pruner: TwinRep, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x, y = cases.batch(seed=seed)
    optimizer.zero_grad()
    nn.functional.cross_entropy(pruner.units.model(x), y).backward()
    pruner.after_backward()
    optimizer.step()
    pruner.after_step()


@pytest.mark.parametrize("cut", [0.0, 0.5])
@pytest.mark.parametrize("case", cases.CASES)
def test_the_gradients_of_the_factors_are_those_of_autograd(case: str, cut: float) -> None:
    pruner, _ = begun(case, Plan(1, 10, 0.1), cut=cut)
    assert pruner.is_cut == (cut == 0)
    model, x, y = copy.deepcopy(pruner.units.model).eval(), *cases.batch()
    factors = [[p.detach().clone().requires_grad_() for p in side] for side in (pruner.left, pruner.right)]
    masks = pruner.current()
    weights = {name: u * v * masks[name] for name, u, v in zip(pruner.units.names, *factors, strict=True)}
    nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y).backward()
    pruner.units.model.eval()
    nn.functional.cross_entropy(pruner.units.model(x), y).backward()
    pruner.after_backward()
    for own, twins in zip((pruner.left, pruner.right), factors, strict=True):
        for parameter, twin in zip(own, twins, strict=True):
            torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-4, atol=1e-7)
    assert all(weight.grad is None for weight in pruner.units.weights)


@given(keep=st.floats(0.01, 0.99), seed=st.integers(0, 2**30))
@settings(max_examples=20, deadline=None)
def test_the_cut_keeps_the_largest_products_of_all(keep: float, seed: int) -> None:
    pruner = TwinRep(Weights(cases.build("conv")), keep, seed=seed)
    answer = list(pruner.masks().values())
    assert mask_ops.kept(pruner.masks()) == pruner.units.total(keep)
    pairs = [(product.abs(), mask) for product, mask in zip(pruner.products(), answer, strict=True)]
    kept = [float(size[mask].min()) for size, mask in pairs if int(mask.sum()) > 1]  # one a layer in any case
    lost = [float(size[~mask].max()) for size, mask in pairs if not mask.all()]
    assert not kept or not lost or min(kept) >= max(lost)


def test_limits_come_before_magnitude() -> None:
    units = Weights(cases.build("conv"), maximum={"features.0": 0.01}, minimum={"classifier.0": 0.2})
    counts = [int(mask.sum()) for mask in TwinRep(units, keep=0.1).masks().values()]
    assert counts[0] <= 2
    assert counts[2] >= 205
    assert sum(counts) == units.total(0.1)


def test_the_weights_are_always_products_and_are_cut_once() -> None:
    pruner, optimizer = begun("residual", Plan(2, 10, 0.1), cut=0.25)
    fixed: dict[str, torch.Tensor] = {}
    for number in range(1, 11):
        step(pruner, optimizer, number)
        assert pruner.ready == pruner.is_cut == (number >= 5)
        if number == 5:
            fixed = copy.deepcopy(pruner.masks())
            layers = zip(pruner.products(), fixed.values(), strict=True)
            twins = [mask_ops.top_k(product.abs(), int(mask.sum())) for product, mask in layers]
            assert all(torch.equal(a, b) for a, b in zip(fixed.values(), twins, strict=True))
        if number >= 5:
            assert all(torch.equal(mask, fixed[name]) for name, mask in pruner.masks().items())
        layers = zip(pruner.units.weights, pruner.products(), pruner.current().values(), strict=True)
        for weight, product, mask in layers:
            assert torch.equal(weight, torch.where(mask, product, 0.0))
            assert mask.all() or number >= 5


def test_both_factors_decay() -> None:
    pruner, optimizer = begun("conv")
    before = [p.detach().clone() for p in (*pruner.left, *pruner.right)]
    for parameter in pruner.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, value in zip((*pruner.left, *pruner.right), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value * (1 - 0.1 * 5e-4))


def test_the_product_starts_with_kaimings_variance() -> None:
    pruner = TwinRep(Weights(build("vgg16", num_classes=10, shape=(3, 32, 32), width=0.25)), keep=0.1)
    for product, weight in zip(pruner.products(), pruner.units.weights, strict=True):
        if weight.numel() > 1000:
            assert float(product.std()) == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.2)
    assert not torch.equal(pruner.left[0], pruner.right[0])


def test_the_first_factors_depend_on_the_seed() -> None:
    models = [cases.build("conv", seed=seed) for seed in (0, 1)]
    first, again = (TwinRep(Weights(model), keep=0.1, seed=3) for model in models)
    other = TwinRep(Weights(models[0]), keep=0.1, seed=4)
    for pruner in (first, again):
        pruner.start()
    for name, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], value), name
    assert not torch.equal(first.left[0], other.left[0])


def test_the_shortest_training_is_cut_too() -> None:
    model = cases.build("conv")
    pruner = TwinRep(Weights(model), keep=0.1, cut=0.99)
    fit(model, [cases.batch()], Natural(), pruner, epochs=1)
    assert pruner.is_cut


@pytest.mark.parametrize("cut", [-0.1, 1.0])
def test_invalid_options_are_refused(cut: float) -> None:
    with pytest.raises(RecipeError, match="share of the training"):
        TwinRep(Weights(cases.build("conv")), keep=0.1, cut=cut)
