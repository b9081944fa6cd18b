"""MAD: the saliency, the masks that follow from it, and that the pass does not change the network."""

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.errors import ModelError, RecipeError
from harp.pruning import masks as mask_ops
from harp.pruning.allocation import allocate
from harp.pruning.methods import Mad
from harp.pruning.methods._kfac import layer_product
from harp.pruning.methods.mad import by_rows, order, removed, soft_masks
from harp.pruning.units import Weights
from harp.training import objectives
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases
from support.methods import Memory, Three

KEEP = 0.1


def measure(pruner: Mad, *seeds: int, objective: Any = None, n: int = 16, dtype: Any = torch.float32) -> list[float]:
    """Show batches to a pruner as the loop does, without an optimiser."""
    wrapped = pruner.wrap(objective or Natural())
    losses = []
    for seed in seeds:
        x, y = cases.batch(n, seed)
        losses.append(float(wrapped(pruner.units.model, x.to(dtype), y)))
        pruner.after_backward()
    return losses


def twin_masks(model: nn.Module, names: list[str], x: Tensor, y: Tensor, steps: int, lr: float) -> list[Tensor]:
    """The soft masks by Adam's formulas written out, on a copy of the network whose weights are overwritten."""
    model = copy.deepcopy(model)
    weights = [model.get_parameter(name) for name in names]
    dense = [weight.detach().clone() for weight in weights]
    u = [torch.full_like(weight, math.log(math.e - 1)) for weight in dense]
    first, second = [torch.zeros_like(v) for v in u], [torch.zeros_like(v) for v in u]
    for t in range(1, steps + 1):
        with torch.no_grad():
            for weight, value, latent in zip(weights, dense, u, strict=True):
                weight.copy_(value * torch.log1p(latent.exp()))
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), weights)
        for i, gradient in enumerate(gradients):
            g = gradient * dense[i] * torch.sigmoid(u[i])
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            step = first[i] / (1 - 0.9**t) / ((second[i] / (1 - 0.999**t)).sqrt() + 1e-8)
            u[i] = (u[i] - lr * step).clamp(math.log(math.exp(1e-4) - 1), math.log(math.e - 1))
    return [torch.log1p(v.exp()) for v in u]


def twin_saliency(model: nn.Module, names: list[str], masks: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """As in the paper: A and G from unfolded patches, and one block a row whose diagonal is the saliency."""
    model = copy.deepcopy(model)
    damage, kept = [], {}
    for name, mask in zip(names, masks, strict=True):
        weight = model.get_parameter(name)
        damage.append((weight * (1 - mask)).detach())
        with torch.no_grad():
            weight.mul_(mask)
        layer = model.get_submodule(name.removesuffix(".weight"))
        layer.register_forward_hook(lambda m, args, out, name=name: kept.update({name: (m, args[0].detach(), out)}))
    loss = F.cross_entropy(model(x), y)  # the mean over the batch
    gradients = torch.autograd.grad(loss, [kept[name][2] for name in names])
    answers = []
    for name, d, g in zip(names, damage, gradients, strict=True):
        layer, a, _ = kept[name]
        batch, positions = len(x), g[0, 0].numel()
        if isinstance(layer, nn.Conv2d):
            a = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
            g = g.flatten(2).transpose(1, 2)
        a, g = a.reshape(-1, a.shape[-1]) / positions, g.reshape(-1, g.shape[-1]) * batch * positions
        aa, gg = a.T @ (a / batch), g.T @ (g / len(g))
        rows = d.flatten(1)
        answer = torch.empty_like(rows)
        for i in range(len(rows)):
            block = (0.5 * gg[i, i] * rows[i].view(-1, 1)) @ (rows[i].view(1, -1) @ aa)
            answer[i] = block.diag()
        answers.append(answer.view_as(d))
    return answers


@pytest.mark.parametrize("case", ["conv", "residual"])
def test_the_saliency_equals_the_equations_of_the_paper(case: str) -> None:
    model = cases.build(case).double()
    pruner = Mad(Weights(model), KEEP, mask_steps=5)
    x, y = cases.batch(8)
    x = x.double()
    names = pruner.units.names
    standing = copy.deepcopy(model).eval()
    masks = twin_masks(standing, names, x, y, 5, 0.1)
    weights = {name: standing.get_parameter(name).detach() for name in names}
    latents, loss = soft_masks(standing, weights, x, y, 5, 0.1)
    for name, mask in zip(names, masks, strict=True):
        torch.testing.assert_close(F.softplus(latents[name]), mask, rtol=1e-6, atol=1e-9)
        assert 1e-4 <= mask.min() < mask.max() <= 1 + 1e-12
    assert float(loss) == pytest.approx(F.cross_entropy(standing(x), y).item())
    assert measure(pruner, 0, n=8, dtype=torch.float64) == [pytest.approx(float(loss))]
    for saliency, expected in zip(pruner.saliency, twin_saliency(standing, names, masks, x, y), strict=True):
        torch.testing.assert_close(saliency.data, expected, rtol=1e-5, atol=1e-12)
        assert saliency.any()


def test_for_linear_least_squares_the_saliency_sums_to_the_exact_change_of_the_loss() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(50, 6, dtype=torch.float64), torch.randn(50, 4, dtype=torch.float64)
    solution = torch.linalg.lstsq(x, target).solution.T
    layer = nn.Linear(6, 4, bias=False).double()
    mask = torch.rand_like(solution)
    damage = solution * (1 - mask)
    identity = torch.ones(50, 4, dtype=torch.float64)  # G_ii = 1
    saliency = 0.5 * damage * layer_product(layer, x, identity, damage, 50)

    def loss(weight: Tensor) -> Tensor:
        return 0.5 * (x @ weight.T - target).square().sum(1).mean()

    torch.testing.assert_close(saliency.sum(), loss(solution * mask) - loss(solution))


def test_masks_that_stay_at_one_give_a_saliency_of_exactly_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1000,), math.log(math.e - 1), dtype=dtype)
        assert not removed(torch.randn(1000, dtype=dtype), one).any()
    model = cases.build("conv")
    pruner = Mad(Weights(model), KEEP, mask_lr=1e-30)  # too small a step to be one
    magnitude = pruner.masks()
    measure(pruner, 0, 1)
    assert pruner.seen == 2
    assert not any(saliency.any() for saliency in pruner.saliency)
    assert pruner.metrics() == {"ties": sum(pruner.units.sizes)}
    assert all(torch.equal(mask, magnitude[name]) for name, mask in pruner.masks().items())


def test_before_the_first_batch_the_masks_are_those_of_magnitude() -> None:
    model = cases.build("conv")
    pruner = Mad(Weights(model), KEEP)
    answer = pruner.masks()
    names = pruner.units.names
    pairs = {name: (model.get_parameter(name).detach().abs(), answer[name]) for name in names}
    competing = names[:-1]  # the last one is the last linear layer
    kept = torch.cat([pairs[name][0][pairs[name][1]] for name in competing])
    gone = torch.cat([pairs[name][0][~pairs[name][1]] for name in competing])
    assert kept.min() >= gone.max()
    for weight, mask in zip(*pairs[names[-1]], strict=True):
        assert weight[mask].min() >= weight[~mask].max()


@pytest.mark.parametrize("case", cases.CASES)
def test_every_model_is_measured_and_left_unchanged(case: str) -> None:
    model = cases.build(case).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # mixed modes must come back as they were
    next(model.parameters()).requires_grad_(False)
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    pruner = Mad(Weights(model), KEEP, mask_steps=3)
    measure(pruner, 0, objective=PgdTraining(steps=1), n=6)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    for name, saliency in zip(pruner.units.names, pruner.saliency, strict=True):
        assert saliency.isfinite().all() and saliency.any(), name
        assert float(saliency.sum()) > 0, f"{name}: the change that the whole damage stands for"
    assert mask_ops.kept(pruner.masks()) == pruner.total


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_loop_moves_no_weight_and_the_optimiser_no_saliency(optimizer: Any) -> None:
    model = cases.build("residual")
    state = copy.deepcopy(model.state_dict())
    pruner = Mad(Weights(model), KEEP, mask_steps=2)
    expected = Mad(Weights(cases.build("residual")), KEEP, mask_steps=2)
    losses = measure(expected, 0, 1, 2)
    build: Any = lambda groups: optimizer(groups, lr=1.0, weight_decay=0.9)  # noqa: E731
    fitted = fit(model, Three(), Natural(), pruner, epochs=1, optimizer=build)
    assert all(torch.equal(a, b) for a, b in zip(pruner.parameters(), expected.parameters(), strict=True))
    assert fitted.history[0]["loss"] == pytest.approx(sum(losses) / 3) == pytest.approx(float(pruner.loss))
    for name, value in model.state_dict().items():
        assert torch.equal(value, torch.where(fitted.masks[name], state[name], 0.0) if name in fitted.masks else value)
        assert name in fitted.masks or torch.equal(value, state[name]), name


def test_batches_are_averaged() -> None:
    together = Mad(Weights(cases.build("grouped")), KEEP, mask_steps=2)
    measure(together, 0, 1, 2)
    alone = [Mad(Weights(cases.build("grouped")), KEEP, mask_steps=2) for _ in range(3)]
    for seed, pruner in enumerate(alone):
        measure(pruner, seed)
    for i, saliency in enumerate(together.saliency):
        mean = torch.stack([pruner.saliency[i] for pruner in alone]).mean(0)
        torch.testing.assert_close(saliency.data, mean, rtol=1e-4, atol=1e-9)


def test_parts_of_a_batch_are_averaged_by_their_size() -> None:
    x, y = cases.batch(16)
    pruner, parts = Mad(Weights(cases.build("conv")), KEEP, mask_steps=2), []
    wrapped = pruner.wrap(Natural())
    for part in (slice(0, 12), slice(12, 16)):
        wrapped(pruner.units.model, x[part], y[part])
        parts.append(Mad(Weights(cases.build("conv")), KEEP, mask_steps=2))
        parts[-1].wrap(Natural())(parts[-1].units.model, x[part], y[part])
        parts[-1].after_backward()
    pruner.after_backward()
    assert pruner.seen == 1
    for saliency, first, second in zip(pruner.saliency, parts[0].saliency, parts[1].saliency, strict=True):
        torch.testing.assert_close(saliency.data, 0.75 * first.data + 0.25 * second.data, rtol=1e-4, atol=1e-9)


def test_only_the_given_number_of_batches_is_measured() -> None:
    limited = Mad(Weights(cases.build("conv")), KEEP, mask_steps=2, batches=2)
    two = Mad(Weights(cases.build("conv")), KEEP, mask_steps=2)
    losses = measure(limited, 0, 1, 2, 3)
    assert losses[:2] == measure(two, 0, 1)
    assert losses[2] == losses[3] == pytest.approx(sum(losses[:2]) / 2)
    assert limited.seen == 2
    assert all(torch.equal(a, b) for a, b in zip(limited.saliency, two.saliency, strict=True))


def test_resumed_in_the_middle_of_the_pass() -> None:
    def run(keeper: Memory) -> Mad:
        model = cases.build("conv")
        pruner = Mad(Weights(model), KEEP, mask_steps=2, batches=2)
        fit(model, Three(), PgdTraining(steps=1), pruner, epochs=1, keeper=keeper)
        return pruner

    expected = run(Memory())
    for stop_after in (1, 2):
        keeper = Memory(stop_after)
        with pytest.raises(InterruptedError):
            run(keeper)
        resumed = run(Memory(state=keeper.state))
        assert resumed.seen == expected.seen == 2
        assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), expected.parameters(), strict=True))


def test_autocast_does_not_reach_the_measurement() -> None:
    plain, cast = (Mad(Weights(cases.build("conv")), KEEP, mask_steps=2) for _ in range(2))
    measure(plain, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measure(cast, 0)
    assert all(torch.equal(a, b) for a, b in zip(plain.saliency, cast.saliency, strict=True))


def split(pruner: Mad, layers: list[int]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(saliency, |W|) of what stays and of what goes in these layers."""
    stays: list[tuple[float, float]] = []
    goes: list[tuple[float, float]] = []
    answer = list(pruner.masks().values())
    for i in layers:
        values = zip(
            pruner.saliency[i].flatten().tolist(), pruner.units.weights[i].abs().flatten().tolist(), strict=True
        )
        for value, kept in zip(values, answer[i].flatten().tolist(), strict=True):
            (stays if kept else goes).append(value)
    return stays, goes


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), keep=st.floats(0.1, 0.98), levels=st.integers(1, 4))
def test_the_lowest_of_all_layers_are_pruned_and_ties_go_by_magnitude(seed: int, keep: float, levels: int) -> None:
    pruner = Mad(Weights(cases.build("conv")), keep)
    generator = torch.Generator().manual_seed(seed)
    for saliency in pruner.saliency:  # few different values, negative ones and zero among them
        saliency.data = torch.randint(-levels, levels + 1, saliency.shape, generator=generator).float()
    answer = pruner.masks()
    assert mask_ops.kept(answer) == pruner.total
    stays, goes = split(pruner, [0, 1, 2])
    assert min(stays) >= max(goes)
    head, weight = list(answer.values())[-1], pruner.units.weights[-1]
    assert int(head.sum()) == round(keep * head.numel())
    counts = head.sum(1)
    assert counts.max() - counts.min() <= 1
    for mask, saliency, magnitude in zip(head, pruner.saliency[-1], weight.abs(), strict=True):
        pairs = list(zip(saliency.tolist(), magnitude.tolist(), strict=True))
        kept = [pair for pair, live in zip(pairs, mask.tolist(), strict=True) if live]
        gone = [pair for pair, live in zip(pairs, mask.tolist(), strict=True) if not live]
        assert not kept or not gone or min(kept) >= max(gone)
    pruner.write(answer)
    assert all(torch.equal(mask, answer[name]) for name, mask in pruner.masks().items()), "also of the written weights"


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300, deadline=None)
@given(st.tuples(FINITE, FINITE), st.tuples(FINITE, FINITE), st.booleans())
def test_the_order_of_the_numbers_is_that_of_the_pairs(
    first: tuple[float, float], second: tuple[float, float], equal: bool
) -> None:
    second = (first[0], second[1]) if equal else second
    saliency, weight = torch.tensor([first, second]).T
    a, b = order(saliency, weight).tolist()
    pairs = (first[0], abs(first[1])), (second[0], abs(second[1]))
    assert (a < b) == (pairs[0] < pairs[1]) and (a == b) == (pairs[0] == pairs[1])
    assert 0 < a < math.inf


def test_a_saliency_that_is_not_finite_is_refused() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ModelError, match="not finite"):
            order(torch.tensor([1.0, value]), torch.ones(2))


def test_of_equal_weights_the_first_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 6), nn.Flatten(), nn.Linear(4, 4))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    pruner = Mad(Weights(model, minimum={"1": 0.01}), keep=0.2)
    first, second, head = pruner.masks().values()
    assert first.all() and int(second.sum()) == pruner.total - 108 - 3
    assert second.flatten()[: int(second.sum())].all()
    assert head.tolist() == [[True, False, False, False]] * 3 + [[False] * 4]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_keep_equally_many(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    count = data.draw(st.integers(0, rows * columns))
    values = data.draw(st.permutations(range(rows * columns)))
    scores = torch.tensor(values, dtype=torch.float64).view(rows, columns)
    mask = by_rows(scores, count)
    each, left_over = divmod(count, rows)
    ranked = [sorted(row, reverse=True) for row in scores.tolist()]
    expected = {value for row in ranked for value in row[:each]}
    expected |= set(sorted((row[each] for row in ranked if each < columns), reverse=True)[:left_over])
    assert set(scores[mask].tolist()) == expected and len(expected) == count


def test_limits_come_before_the_share_of_the_last_linear_layer() -> None:
    model = cases.build("conv")
    units = Weights(model, minimum={"features.0": 0.9}, maximum={"classifier.0": 0.1, "features.4": 0.1})
    pruner = Mad(units, keep=0.19)  # 194 to 216, 115 and 102 of the others leave 34 or more to it, its share is 12
    counts = [int(mask.sum()) for mask in pruner.masks().values()]
    assert sum(counts) == units.total(0.19) == 467
    assert counts[-1] == 34
    assert all(low <= count <= high for low, count, high in zip(units.lower, counts, units.upper, strict=True))
    everything = Mad(Weights(model), keep=1.0).masks()
    assert all(mask.all() for mask in everything.values())


def test_networks_with_only_linear_layers_and_without_any() -> None:
    units = Weights(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
    pruner = Mad(units, 0.1)
    assert sorted(pruner.masks()["1.weight"].sum(1).tolist()) == [19, 19, 19, 20]
    assert pruner.total == 77
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 6), nn.Flatten())
    pruner = Mad(Weights(convolutions), 0.1, mask_steps=2)
    measure(pruner, 0)
    stays, goes = split(pruner, [0, 1])
    assert pruner.head is None and min(stays) >= max(goes) and len(stays) == pruner.total


@pytest.mark.parametrize("strategy", ["uniform", "erk", "lamp"])
def test_a_strategy_decides_the_counts_and_the_saliency_the_weights(strategy: str) -> None:
    model = cases.build("residual")
    units = Weights(model)
    pruner = Mad(units, KEEP, strategy=strategy, mask_steps=2)
    measure(pruner, 0)
    answer = pruner.masks()
    assert [int(mask.sum()) for mask in answer.values()] == allocate(strategy, units, pruner.total)
    for i in range(len(units.names) - 1):
        stays, goes = split(pruner, [i])
        assert min(stays) >= max(goes)


def test_ties_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = cases.build("conv")
    pruner = Mad(Weights(model), KEEP, mask_steps=2)
    with caplog.at_level(logging.INFO, logger="harp"):
        fitted = fit(model, Three(), Natural(), pruner, epochs=1)
    ties = sum(int((saliency == 0).sum()) for saliency in pruner.saliency)
    assert fitted.history[0]["ties"] == ties
    assert 0 < ties < sum(pruner.units.sizes)
    assert any(f"{ties} of {sum(pruner.units.sizes)}" in record.message for record in caplog.records)


@pytest.mark.parametrize("options", [{"mask_steps": 0}, {"mask_lr": 0.0}, {"mask_lr": math.nan}, {"batches": 0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(options))):
        Mad(Weights(cases.build("conv")), KEEP, **options)


def test_a_loss_that_does_not_attack_is_refused() -> None:
    pruner = Mad(Weights(cases.build("conv")), KEEP)
    with pytest.raises(ModelError, match="attack"):
        pruner.wrap(lambda model, x, y, forward=None: F.cross_entropy(model(x), y))
    optimizer = torch.optim.SGD(pruner.units.model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"harp\.fit"):
        pruner.attach(optimizer)


def test_mad_is_fine_tuned_with_half_of_marts_divergence() -> None:
    assert objectives.made(Mad.finetuning).beta == 0.5
    assert Mad.passes == 1
