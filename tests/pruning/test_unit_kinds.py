"""The contract of the methods over every kind of units: single weights by MACs, channels by hand and as traced."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harp.errors import BudgetError, ModelError, RecipeError
from harp.experiments import artefact
from harp.pruning.methods import PRUNERS, Admm, Fixed, Harp, HarpRates, Hydra, Magnitude, TwinRep
from harp.pruning.methods.admm import project
from harp.pruning.methods.hydra import initial_scores
from harp.pruning.units import Units, exact
from harp.training.loop import fit
from harp.training.objectives import PgdTraining
from support import cases
from support.kinds import KINDS, check, make
from support.methods import Memory, Three, train

KEEP = 0.3
GENERAL = sorted(name for name, method in PRUNERS.items() if not method.granular and name not in ("dense", "fixed"))


def kept(units: Units, masks: dict[str, Tensor]) -> list[int]:
    return [layer["kept"] for layer in artefact.layers(units, masks)]


def check_whole(units: Units, masks: dict[str, Tensor]) -> None:
    """Whether everything that a unit masks is kept, or nothing of it is."""
    ones = units.gather([torch.ones_like(weight) for weight in units.weights])
    for full, kept in zip(ones, units.gather([mask.float() for mask in masks.values()]), strict=True):
        assert full is not None and kept is not None
        assert bool(((kept == 0) | (kept == full)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_units_protocol_is_consistent(kind: str) -> None:
    units = make(kind)
    weights = [weight.detach() for weight in units.weights]
    assert list(units.masked) == list(units.expand([s > 0 for s in units.strength(weights, 1)]))
    assert units.spend(units.sizes) == units.size and not exact(units)
    torch.manual_seed(0)
    for _ in range(3):
        masks = [torch.rand(s.shape) < 0.5 for s in units.strength(weights, 1)]
        masks = [mask if mask.any() else ~mask for mask in masks]
        expanded = units.expand(masks)
        counts = [int(mask.sum()) for mask in masks]
        check_whole(units, expanded)
        assert kept(units, expanded) == counts
        assert units.spent(expanded) == units.spend(counts)
        # A unit's l1 norm is the sum over its weights, and l2 the root of the sum of squares.
        sums = units.gather([weight.abs() for weight in weights])
        squares = units.gather([weight.square() for weight in weights])
        for one, two, total, square in zip(
            units.strength(weights, 1), units.strength(weights, 2), sums, squares, strict=True
        ):
            torch.testing.assert_close(one, total)
            torch.testing.assert_close(two.square(), square)
    rates = torch.linspace(0.2, 0.9, len(units.sizes), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(units.cost(rates), rates)
    cost, slope = units.slope(rates.detach().numpy())
    assert cost == pytest.approx(float(units.cost(rates).detach())) and slope == pytest.approx(gradient.numpy())
    for keep in (0.2, 0.7):
        rate = units.uniform_rate(units.total(keep))
        even = units.slope(np.full(len(units.sizes), rate))[0]
        assert even == pytest.approx(units.total(keep), rel=1e-6)
    whole = units.counts([1.0] * len(units.sizes))
    assert whole == units.upper and all(
        n >= low for n, low in zip(units.counts(rates.tolist()), units.lower, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", GENERAL)
def test_the_budget_is_always_met_and_only_whole_units_are_pruned(method: str, kind: str, tmp_path: Path) -> None:
    units = make(kind)
    keys = list(units.model.state_dict())
    pruner = PRUNERS[method](units, keep=KEEP)
    assert pruner.total == units.total(KEEP)
    for steps in (0, 2):
        train(units.model, pruner, steps)
        answer = pruner.masks()
        assert list(answer) == units.masked
        check_whole(units, answer)
        check(units, kept(units, answer), pruner.total)
        with pruner.exact():
            assert all(not w[~answer[n]].any() for n, w in zip(units.masked, units.weights, strict=True))
    finished = pruner.finish()
    assert all(torch.equal(a, b) for a, b in zip(answer.values(), finished.values(), strict=True))
    assert list(units.model.state_dict()) == keys
    artefact.save(tmp_path, units.model, finished, pruner.total, units)
    with pytest.raises(BudgetError, match=f"{units.noun} kept"):
        artefact.save(tmp_path, units.model, finished, units.spent(finished) - 1, units)
    with torch.no_grad():
        next(w for n, w in zip(units.masked, units.weights, strict=True) if not finished[n].all()).fill_(1.0)
    with pytest.raises(BudgetError, match="outside the masks"):
        artefact.save(tmp_path, units.model, finished, pruner.total, units)


@pytest.mark.parametrize("kind", ["channels", "macs"])
@pytest.mark.parametrize("method", sorted(set(PRUNERS) - set(GENERAL) - {"dense", "fixed"}))
def test_methods_for_single_weights_refuse_other_units(method: str, kind: str) -> None:
    units = make(kind)
    with pytest.raises(RecipeError, match=f"no form for {units.kind} under a budget of {units.noun}"):
        PRUNERS[method](units, keep=KEEP)


def fitted(method: str, kind: str, keeper: Memory) -> Any:
    units = make(kind)
    pruner = PRUNERS[method](units, keep=KEEP)
    fit(units.model, Three(), PgdTraining(steps=1), pruner, epochs=2, lr=0.05, keeper=keeper)
    return units.model, pruner


@pytest.mark.parametrize("method", ["harp", "tandem", "r-admm", "twinrep"])
def test_resumed_equals_uninterrupted_bit_for_bit(method: str) -> None:
    expected, pruner = fitted(method, "channels", Memory())
    keeper = Memory(2)
    with pytest.raises(InterruptedError):
        fitted(method, "channels", keeper)
    model, resumed = fitted(method, "channels", Memory(state=keeper.state))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(resumed.masks().values(), pruner.masks().values(), strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "macs"])
def test_the_gradient_of_a_score_is_that_of_a_gate_on_all_that_its_unit_masks(kind: str) -> None:
    units = make(kind)
    units.model.eval()
    pruner = Hydra(units, keep=KEEP)
    dense = [weight.detach().clone() for weight in units.weights]
    pruner.trainable()
    pruner.start()
    x, y = cases.batch()
    nn.functional.cross_entropy(units.model(x), y).backward()
    pruner.after_backward()
    live = units.gather([mask.float() for mask in pruner.current().values()])
    gates = [(entries > 0).float().requires_grad_() for entries in live if entries is not None]
    factors = [torch.ones_like(weight) for weight in dense]
    for i, gate in enumerate(gates):
        for j in range(len(gate)):
            without = [torch.ones_like(other, dtype=torch.bool) for other in gates]
            without[i][j] = False
            gone = [(~mask).float() for mask in units.expand(without).values()]
            factors = [f - (1 - gate[j]) * g for f, g in zip(factors, gone, strict=True)]
    weights = {n: w * f for n, w, f in zip(units.masked, dense, factors, strict=True)}
    loss = nn.functional.cross_entropy(torch.func.functional_call(units.model, weights, (x,)), y)
    for score, gradient in zip(pruner.scores, torch.autograd.grad(loss, gates), strict=True):
        torch.testing.assert_close(score.grad, gradient * score.detach().sign(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_masks_keep_the_largest_l1_norms(kind: str) -> None:
    units = make(kind)
    strengths = units.strength(units.weights, 1)
    for score, strength, fan in zip(initial_scores(units), strengths, units.fans, strict=True):
        torch.testing.assert_close(score.abs(), strength * (6 / fan) ** 0.5 / strength.max())
    expected = Magnitude(units, KEEP).masks()
    for method in (Hydra, HarpRates, Harp):
        answer = method(units, keep=KEEP).masks()
        if method is Hydra:
            assert all(torch.equal(answer[name], expected[name]) for name in expected)
        for strength, counted, mask in zip(
            strengths, kept(units, answer), units.gather([m.float() for m in answer.values()]), strict=True
        ):
            assert mask is not None
            live = mask > 0
            assert int(live.sum()) == counted
            assert counted == live.numel() or float(strength[live].min()) >= float(strength[~live].max())


@pytest.mark.parametrize("kind", ["filters", "channels"])
def test_the_global_cut_keeps_the_largest_l2_norms(kind: str) -> None:
    units = make(kind)
    strengths = [s.tolist() for s in units.strength(units.weights, 2)]
    pruner = PRUNERS["global"](units, keep=KEEP)
    counts = kept(units, pruner.masks())
    ranked = [sorted(layer, reverse=True) for layer in strengths]
    # A unit that went is larger than the smallest that stayed only if it is too dear, or that one is its layer's least.
    least = min(layer[count - 1] for layer, count, low in zip(ranked, counts, units.lower, strict=True) if count > low)
    for i, (layer, count) in enumerate(zip(ranked, counts, strict=True)):
        if count < len(layer) and layer[count] > least:
            larger = [n + (j == i) for j, n in enumerate(counts)]
            assert units.spend(larger) > units.total(KEEP)
    torch.manual_seed(3)
    twin = TwinRep(units, keep=KEEP)
    check(units, kept(units, twin.masks()), twin.total)


@pytest.mark.parametrize("kind", ["filters", "channels"])
def test_the_projection_zeroes_the_units_of_smallest_l2_norm(kind: str) -> None:
    units = make(kind)
    pruner = Admm(units, keep=KEEP)
    values = [weight.detach() for weight in units.weights]
    projected = project(units, values, pruner.counts)
    again = project(units, projected, pruner.counts)
    assert all(torch.equal(a, b) for a, b in zip(projected, again, strict=True))
    before, after = units.strength(values, 2), units.strength(projected, 2)
    for old, new, count in zip(before, after, pruner.counts, strict=True):
        assert int((new > 0).sum()) == count
        assert torch.equal(old[new > 0].sort().values, old.sort().values[-count:])
    with torch.no_grad():
        units.weights[0].add_(0.1)
    pruner.period = 1
    pruner.after_epoch()
    assert torch.equal(pruner.get_buffer("u0"), units.weights[0].detach() - pruner.get_buffer("z0"))


@pytest.mark.parametrize("kind", KINDS)
def test_harp_as_published_starts_from_the_rates_of_the_units(kind: str) -> None:
    units = make(kind)
    pruner = Harp(units, keep=KEEP, published=True)
    start = pruner.rates().detach()
    assert pruner.step == units.gamma_step
    if units.kind == "channels":
        assert bool((start > 0.98).all()) and float(pruner.budget_loss().detach()) > 1
    least = torch.tensor([0.1 * units.uniform_rate(pruner.total)] * len(start), dtype=torch.float64)
    assert torch.equal(pruner.low, torch.maximum(least, torch.tensor(units.floors, dtype=torch.float64)))


@pytest.mark.parametrize("kind", ["filters", "channels", "macs"])
def test_learned_rates_fall_to_the_budget(kind: str) -> None:
    units = make(kind)
    pruner = Harp(units, keep=KEEP, published=True, initial_rate=0.9, gamma_step=20.0)
    over = float(pruner.budget_loss().detach())
    train(units.model, pruner, 2)
    fit(units.model, Three(), PgdTraining(steps=1), pruner, epochs=6, lr=0.1)
    assert float(pruner.budget_loss().detach()) < 0.05 < over
    check(units, kept(units, pruner.masks()), pruner.total)


def test_the_soft_budget_is_differentiated_through_the_units_cost() -> None:
    units = make("filters")
    pruner = Harp(units, keep=KEEP, published=True)
    pruner.gamma = 3.0
    gradients = [torch.randn_like(score) for score in pruner.scores]
    sums = [float(gradient.sum()) for gradient in gradients]
    pruner.pull(gradients)
    _, slope = units.slope(pruner.rates().detach().numpy())
    sigmoid = pruner.quotas.detach().double().sigmoid().numpy()
    inner = pruner.span.numpy() * sigmoid * (1 - sigmoid)
    expected = (np.array(sums) + 3.0 * slope / pruner.total) * inner
    assert pruner.quotas.grad is not None
    assert pruner.quotas.grad.numpy() == pytest.approx(expected, rel=1e-4)


def test_sharpness_moves_the_scores_of_channels() -> None:
    units = make("channels")
    pruner = Hydra(units, keep=KEEP, sharpness=0.1)
    fit(units.model, Three(), PgdTraining(steps=1), pruner, epochs=1, lr=0.05)
    before = [score.detach().clone() for score in pruner.scores]
    pruner.perturb([torch.randn_like(weight) for weight in units.weights])
    for old, new in zip(before, pruner.scores, strict=True):
        assert float((new.detach() - old).norm()) == pytest.approx(0.1 * float(old.norm()), rel=1e-4)
    pruner.after_backward()
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, pruner.scores, strict=True))


def test_fine_tuning_keeps_the_masks_of_channels() -> None:
    units = make("channels")
    answer = copy.deepcopy(Magnitude(units, KEEP).masks())
    pruner = Fixed(units, answer)
    assert pruner.total == units.spent(answer) <= units.total(KEEP)
    train(units.model, pruner, 3)
    assert all(not w[~answer[n]].any() for n, w in zip(units.masked, units.weights, strict=True))
    assert all(torch.equal(mask, answer[name]) for name, mask in pruner.finish().items())
    with pytest.raises(ModelError, match="masks of another model"):
        Fixed(units, {**answer, "linear.bias": torch.ones(4, dtype=torch.bool)})


def test_a_copy_prunes_its_own_model() -> None:
    units = make("channels")
    pruner = Harp(units, keep=KEEP)
    train(units.model, pruner, 2)
    model, twin = copy.deepcopy((units.model, pruner))
    assert twin.units.model is model
    before = copy.deepcopy(units.model.state_dict())
    train(model, twin, 2)
    assert all(torch.equal(value, units.model.state_dict()[name]) for name, value in before.items())
