"""The contract of every method over every model shape."""

import copy
import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harp.errors import BudgetError, ModelError, RecipeError
from harp.pruning import masks as mask_ops
from harp.pruning.methods import PRUNERS, Dense, Dynamic, Fixed, FlyingBirdPlus, Harp, HarpRates, Hydra, Magnitude
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases, contract
from support.methods import KEEP, VARIANTS, Memory, Three, make, train

METHODS = sorted(set(PRUNERS) - {"dense", "fixed"})
LEARNED = ["harp", "harp-r", "harp-s", "hydra"]
ONE_SHOT = ["erk", "global", "lamp", "magnitude", "random"]


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_the_budget_is_always_exact_and_the_model_stays_plain(method: str, case: str) -> None:
    contract.budget_is_exact_and_model_stays_plain(method, case)


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("method", sorted(PRUNERS))
def test_the_model_can_be_copied_and_pickled_during_training(method: str, case: str) -> None:
    contract.model_can_be_copied_and_pickled(method, case)


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("method", [*sorted(PRUNERS), *VARIANTS])
def test_resumed_equals_uninterrupted_bit_for_bit(method: str, case: str) -> None:
    contract.resumed_equals_uninterrupted(method, case)


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("method", sorted(PRUNERS))
def test_compiled_equals_eager(method: str, case: str) -> None:
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = cases.build(case)
        for module in model.modules():  # dropout draws in another order when compiled
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        pruner = make(method, model)
        train(model, pruner, 3, torch.compile(model, backend="aot_eager") if compiled else model)
        outcomes.append(model.state_dict())
    for name, value in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], value, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("method", LEARNED)
def test_frozen_norms_stay_frozen(method: str) -> None:
    model = cases.build("residual")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    norms[0].requires_grad_(False)
    before = [norm.weight.detach().clone() for norm in norms]
    pruner = make(method, model)
    train(model, pruner, 4)
    pruner.finish()
    assert torch.equal(norms[0].weight, before[0]) and not norms[0].weight.requires_grad
    assert not torch.equal(norms[1].weight, before[1]) and norms[1].weight.requires_grad


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("method", LEARNED)
def test_frozen_parameters_do_not_change(method: str, case: str) -> None:
    model = cases.build(case)
    before = copy.deepcopy(model.state_dict())
    pruner = make(method, model)
    train(model, pruner, 4)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d | nn.LayerNorm)]
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] in norms:
            assert not torch.equal(parameter, before[name]), f"{name} should be trained"
        elif name in pruner.units.names:
            live = parameter != 0
            assert torch.equal(parameter[live], before[name][live]), f"{name} should hold dense weights or zeros"
        else:
            assert torch.equal(parameter, before[name]), f"{name} should be frozen"
    for dense, name in zip(pruner.dense, pruner.units.names, strict=True):
        assert torch.equal(dense, before[name])


@pytest.mark.parametrize("method", LEARNED)
def test_masks_are_computed_once_a_step_however_long_the_attack_is(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, partition = [], np.partition  # which finds the threshold of a layer's scores
    monkeypatch.setattr(np, "partition", lambda *given: calls.append(1) or partition(*given))
    selections = []
    for steps in (1, 5):
        calls.clear()
        model = cases.build("conv")
        pruner = make(method, model)
        fit(model, Three(), PgdTraining(steps=steps), pruner, epochs=1, lr=0.1)
        selections.append(len(calls))
    assert selections[0] == selections[1] >= 4 * len(pruner.units.names)  # at the start and after each of three steps


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("method", METHODS)
def test_the_result_depends_on_the_seed_of_the_training(method: str) -> None:
    """The training's seed. Masks that are chosen before the first step do not depend on it; all weights do."""

    def answer(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = cases.build("residual")
        pruner = make(method, model, **({"cut": 0.5} if method == "twinrep" else {}))  # not after the first step
        masks = fit(model, Three(), PgdTraining(), pruner, epochs=2, lr=0.5, seed=seed).masks
        return masks, model.state_dict()

    first, again, other = answer(0), answer(0), answer(1)
    assert same(first[0], again[0]) and same(first[1], again[1])
    assert same(first[0], other[0]) == (method in ONE_SHOT)
    assert not same(first[1], other[1])


@pytest.mark.parametrize("method", METHODS)
def test_a_pruner_draws_by_its_own_seed_only(method: str) -> None:
    def answer(ambient: int = 0, **options: int) -> dict[str, torch.Tensor]:
        model = cases.build("residual")
        torch.manual_seed(ambient)
        pruner = make(method, model, **options)
        train(model, pruner, 4)
        return {**model.state_dict(), **pruner.masks()}

    first = answer()
    assert same(first, answer(ambient=1)) == (method != "anp-vs")  # its forward pass draws, by the training's seed
    if "seed" in inspect.signature(PRUNERS[method]).parameters:
        assert same(first, answer(seed=0))
        assert not same(first, answer(seed=1))


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("method", sorted(PRUNERS))
def test_gradients_of_an_earlier_training_are_ignored(method: str, case: str) -> None:
    contract.earlier_gradients_do_not_count(method, case)


class UnusedLayer(cases.ConvNet):
    """A network with a layer that its forward pass does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(16, 16)


@pytest.mark.parametrize("method", [*sorted(PRUNERS), *VARIANTS])
def test_a_layer_without_a_gradient_is_pruned_too(method: str) -> None:
    torch.manual_seed(0)
    model = UnusedLayer()
    pruner = make(method, model)
    fitted = fit(model, Three(), PgdTraining(steps=1), pruner, epochs=2, lr=0.05)
    assert mask_ops.kept(fitted.masks) == pruner.total
    assert fitted.masks["unused.weight"].any()
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_method_that_changes_the_loss_refuses_another_loop() -> None:
    model = cases.build("conv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"FlyingBirdPlus changes the loss, .*: use harp\.fit"):
        FlyingBirdPlus(Weights(model), KEEP).attach(optimizer)


def test_moved_masks_clear_the_moments_of_adam() -> None:
    model = cases.build("conv")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pruner = Dynamic(Weights(model), Magnitude(Weights(model), KEEP).masks()).attach(optimizer)
    x, y = cases.batch()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    before, moved = copy.deepcopy(pruner.masks()), PRUNERS["random"](Weights(model), keep=KEEP).masks()
    pruner.move(moved)
    for name, weight in zip(pruner.units.names, pruner.units.weights, strict=True):
        stays = before[name] & moved[name]
        for key in ("exp_avg", "exp_avg_sq"):
            moments = optimizer.state[weight][key]
            assert not moments[~stays].any()
        assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_fixed_masks_stay_under_any_optimiser(optimizer: Any) -> None:
    model = cases.build("conv")
    pruner = make("fixed", model)
    answer = copy.deepcopy(pruner.masks())
    stepper = optimizer(pruner.trainable(), lr=0.1, weight_decay=0.1)
    pruner.start()
    for step in range(20):
        stepper.zero_grad()
        x, y = cases.batch(seed=step)
        nn.functional.cross_entropy(model(x), y).backward()
        pruner.after_backward()
        stepper.step()
        pruner.after_step()
        for name, weight in zip(pruner.units.names, pruner.units.weights, strict=True):
            assert not weight[~answer[name]].any()
    for state in stepper.state.values():
        momentum = state.get("momentum_buffer", state.get("exp_avg"))
        mask = next((m for m in answer.values() if momentum is not None and m.shape == momentum.shape), None)
        assert mask is None or not momentum[~mask].any()


@pytest.mark.parametrize("method", LEARNED)
def test_pruning_takes_two_lines_in_any_loop(method: str) -> None:
    model = cases.build("conv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = PRUNERS[method](Weights(model), keep=KEEP).attach(optimizer)  # line one
    for epoch in range(3):
        for step in range(3):
            x, y = cases.batch(seed=3 * epoch + step)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        pruner.after_epoch()  # line two
    answer = pruner.finish()
    assert sum(int((w != 0).sum()) for w in pruner.units.weights) <= mask_ops.kept(answer) == pruner.total


def test_first_masks_are_the_magnitude_masks() -> None:
    model = cases.build("residual")
    magnitude = Magnitude(Weights(model), KEEP).masks()
    for method in (Hydra, partial(HarpRates, published=True), partial(Harp, published=True)):
        answer = method(Weights(model), keep=KEEP).masks()
        assert all(torch.equal(answer[name], magnitude[name]) for name in magnitude), method
    for name, weight in zip(magnitude, Weights(model).weights, strict=True):
        kept, pruned = weight[magnitude[name]].abs(), weight[~magnitude[name]].abs()
        assert kept.min() >= pruned.max()


def test_the_masks_of_rates_only_follow_the_magnitudes() -> None:
    model = cases.build("conv")
    dense = copy.deepcopy(model.state_dict())
    pruner = make("harp-r", model, published=True, gamma_step=0.5)
    train(model, pruner, 6)
    for name, mask in pruner.masks().items():
        weight = dense[name].abs()
        assert not mask.any() or mask.all() or weight[mask].min() >= weight[~mask].max()


@pytest.mark.parametrize("strategy", ["erk", "lamp", "global", "igq"])
def test_strategies_decide_the_counts(strategy: str) -> None:
    from harp.pruning.allocation import allocate

    model = cases.build("conv")
    units = Weights(model)
    expected = allocate(strategy, units, units.total(KEEP))
    for method in (Magnitude, Hydra):
        answer = method(units, KEEP, strategy=strategy).masks()
        assert [int(mask.sum()) for mask in answer.values()] == expected
    started = Harp(units, keep=KEEP, initial_strategy=strategy, published=True)
    rates = (started.rates() * torch.tensor(units.sizes)).tolist()
    clipped = [
        n * (float(low) + 0.99 * float(span))
        for n, low, span in zip(units.sizes, started.low, started.span, strict=True)
    ]
    assert rates == pytest.approx([min(a, b) for a, b in zip(expected, clipped, strict=True)], rel=1e-4)


@pytest.mark.parametrize(("method", "strategy"), [("erk", "erk"), ("lamp", "lamp"), ("global", "global")])
def test_one_shot_methods_equal_magnitude_at_their_rates(method: str, strategy: str) -> None:
    units = Weights(cases.build("residual"))
    answer, expected = PRUNERS[method](units, keep=KEEP).masks(), Magnitude(units, KEEP, strategy).masks()
    assert all(torch.equal(answer[name], expected[name]) for name in expected)


@pytest.mark.parametrize("method", [name for name, pruner in PRUNERS.items() if pruner.same_as])
def test_methods_declared_the_same_give_the_same_bits(method: str) -> None:
    expected, _ = contract.fitted(PRUNERS[method].same_as or "", "residual", Memory())
    model, _ = contract.fitted(method, "residual", Memory())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected.state_dict().items())


def test_global_magnitude_keeps_the_largest_weights_of_all_layers() -> None:
    units = Weights(cases.build("conv"))
    masks = PRUNERS["global"](units, keep=KEEP).masks().values()
    pairs = list(zip(units.weights, masks, strict=True))
    least = min(
        float(w.detach()[m].abs().min()) for w, m in pairs if int(m.sum()) > 1
    )  # one a layer is kept in any case
    assert least >= max(float(w.detach()[~m].abs().max()) for w, m in pairs)


def test_random_masks_depend_on_the_seed_only() -> None:
    units = Weights(cases.build("conv"))
    first, again, other = (PRUNERS["random"](units, keep=KEEP, seed=seed).masks() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    counts = [int(mask.sum()) for mask in Magnitude(units, KEEP).masks().values()]
    assert [int(mask.sum()) for mask in first.values()] == counts


@pytest.mark.parametrize("options", [{}, {"published": True, "gamma_step": 1.0}], ids=["stable", "published"])
def test_limits_are_kept_by_learned_rates(options: dict[str, Any]) -> None:
    model = cases.build("conv")
    units = Weights(model, minimum={"features.0": 0.5}, maximum={"classifier.0": 0.05})
    pruner = Harp(units, keep=KEEP, **options)
    train(model, pruner, 10)
    for answer in (pruner.current(), pruner.masks()):
        assert int(answer["features.0.weight"].sum()) >= 108
        assert int(answer["classifier.0.weight"].sum()) <= 51
    assert mask_ops.kept(pruner.masks()) == units.total(KEEP)


def test_dense_training_ignores_limits() -> None:
    model = cases.build("conv")
    train(model, Dense(Weights(model, maximum={"*": 0.5})), 1)


def test_writing_inside_autocast_is_refused() -> None:
    model = cases.build("conv")
    pruner = make("harp", model)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ModelError, match="autocast"):
        pruner.start()


def test_bfloat16_training_uses_the_new_weights_of_every_step() -> None:
    model = cases.build("conv")
    pruner = make("harp", model)
    optimizer = torch.optim.SGD(pruner.trainable(), lr=1.0)
    pruner.start()
    x, y = cases.batch()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        plain = model(x)
        assert torch.allclose(logits.float(), plain, atol=0.1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.float(), y).backward()
        pruner.after_backward()
        optimizer.step()
        pruner.after_step()


def test_masks_of_another_model_are_refused() -> None:
    units = Weights(cases.build("conv"))
    other = Magnitude(Weights(cases.build("residual")), KEEP).masks()
    with pytest.raises(ModelError, match="another model"):
        Fixed(units, other)
    with pytest.raises(ModelError, match="belongs to no prunable layer"):
        Fixed(units, {**Magnitude(units, KEEP).masks(), "extra.weight": torch.ones(2, 2, dtype=torch.bool)})


@pytest.mark.parametrize(
    "options",
    [
        {"published": True, "initial_rate": 0.0},
        {"published": True, "initial_rate": 1.5},
        {"published": True, "gamma_step": 0.0},
        {"gamma_step": 0.01},
        {"initial_rate": 0.1},
        {"start": 0.5},
        {"reach": -1.0},
        {"quota_lr": 0.1},
    ],
)
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError):
        Harp(Weights(cases.build("conv")), keep=KEEP, **options)
    with pytest.raises(BudgetError):
        Harp(Weights(cases.build("conv")), keep=1e-6)


def test_dense_training_equals_a_plain_loop() -> None:
    model, twin = cases.build("residual"), cases.build("residual")
    train(model, Dense(Weights(model)), 3)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for step in range(3):
        x, y = cases.batch(seed=step)
        optimizer.zero_grad()
        Natural()(twin, x, y).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
