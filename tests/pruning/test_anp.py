"""ANP-VS: the distribution of its masks, the two losses in one graph, and the network without its gates."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.attacks import Ball, Pgd
from harp.errors import ModelError, RecipeError
from harp.pruning import masks as mask_ops
from harp.pruning.methods import AnpVs, Plan
from harp.pruning.methods.anp import CrippledPgd, Standardised, outputs_of, standardise
from harp.pruning.methods.beta_bernoulli import ALPHA, Gate, divergence, expected_pi, sample_log_pi
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases
from support.methods import Three, train

KEEP = 0.1


def gates(pruner: AnpVs) -> list[Gate]:
    return [gate for _, gate in pruner.layers()]


def built(case: str, **options: Any) -> tuple[nn.Module, AnpVs]:
    """A model whose passes agree with each other (no dropout), and a pruner at work on it."""
    model = cases.build(case)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    pruner = AnpVs(Weights(model), **options)
    pruner.start()
    return model, pruner


def scatter(pruner: AnpVs, low: float = -9.5, high: float = 3.0) -> None:
    """Masks all over their range, some units of every layer below the threshold and at least one far above."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for gate in gates(pruner):
            gate.raw[0] = low + (high - low) * torch.rand(gate.raw[0].shape, generator=generator)
            gate.raw[0, 1], gate.raw[0, 2] = low, high
    pruner.after_step()


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_divergence_is_zero_at_the_prior() -> None:
    assert float(divergence(number(ALPHA), number(1.0))) == pytest.approx(0, abs=1e-12)


@given(st.floats(5e-5, 60), st.floats(5e-5, 50))
def test_the_divergence_is_never_negative(a: float, b: float) -> None:
    assert float(divergence(number(a), number(b))) >= -1e-9


def test_the_divergence_is_that_of_the_two_densities() -> None:
    a, b = 0.7, 2.5
    x = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000  # of u: π = (1 − (1 − u)^(1/b))^(1/a)
    pi = (1 - (1 - x) ** (1 / b)) ** (1 / a)
    log_q = torch.log(number(a * b)) + (a - 1) * pi.log() + (b - 1) * torch.log1p(-(pi**a))
    log_p = torch.log(number(ALPHA)) + (ALPHA - 1) * pi.log()
    assert float((log_q - log_p).mean()) == pytest.approx(float(divergence(number(a), number(b))), rel=1e-3)


def test_the_mean_has_the_known_values() -> None:
    assert float(expected_pi(number(0.3133), number(1.0))) == pytest.approx(0.2385, abs=1e-4)
    assert float(expected_pi(number(2.1269), number(1.0))) == pytest.approx(0.6802, abs=1e-4)
    model = cases.build("conv")
    pruner = AnpVs(Weights(model))
    means = [float(gate.expected().mean()) for gate in gates(pruner)]
    assert means == pytest.approx([0.6802, 0.6802, 0.2385, 0.2385], abs=1e-4)


@pytest.mark.parametrize(("a", "b"), [(2.1269, 1.0), (0.3133, 1.0), (0.5, 3.0), (5.0, 0.2)])
def test_drawn_masks_have_the_mean_that_eval_mode_uses(a: float, b: float) -> None:
    ones = torch.ones(200_000)
    pi = sample_log_pi(a * ones, b * ones).exp()
    assert float(pi.mean()) == pytest.approx(float(expected_pi(number(a), number(b))), abs=4e-3)


@given(st.floats(-30, 30), st.floats(-30, 80))
def test_draws_and_their_gradients_are_finite_wherever_the_parameters_go(a: float, b: float) -> None:
    gate = Gate(torch.zeros(6, 4), 0.1, 1e-3)
    with torch.no_grad():
        gate.raw[0], gate.raw[1] = a, b
    z = gate.draw(50)
    z.sum().backward()
    assert z.isfinite().all()
    assert (z >= 0).all()
    assert (z <= 1).all()
    assert gate.raw.grad is not None
    assert gate.raw.grad.isfinite().all()
    (gradient,) = torch.autograd.grad(gate.divergence(), gate.raw)
    assert gradient.isfinite().all()
    assert gate.expected().isfinite().all()


def test_masks_are_per_example_and_the_same_at_every_position() -> None:
    gate = Gate(torch.zeros(8, 3, 3, 3), 0.1, 1e-3)
    module = nn.Identity()
    out = gate.after(module, (), torch.ones(5, 8, 4, 4))
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out))
    assert not torch.equal(out[0], out[1])
    (sequence,) = Gate(torch.zeros(2, 8), 0.1, 1e-3).before(module, (torch.ones(5, 7, 8),))
    assert torch.equal(sequence, sequence[:, :1].expand_as(sequence))
    assert not torch.equal(sequence[0], sequence[1])
    (single,) = Gate(torch.zeros(2, 8), 0.1, 1e-3).before(module, (torch.ones(8),))
    assert single.shape == (8,)


@pytest.mark.parametrize("case", ["conv", "residual", "grouped", "tied", "transformer"])
def test_each_parameter_gets_the_gradient_of_its_own_loss(case: str) -> None:
    model, pruner = built(case, vulnerability=0.5)
    x, y = cases.batch()
    objective = pruner.wrap(PgdTraining(epsilon=0.1, steps=2))
    statistics = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    loss = objective(model, x, y)
    loss.backward()

    model.load_state_dict(statistics)  # the attack uses them
    torch.manual_seed(3)  # as in the paper: the same masks, as a plain graph, and each loss alone
    x_adv = PgdTraining(epsilon=0.1, steps=2).attack(model, x, y)
    for gate in gates(pruner):
        gate.record = []
    model(x)
    drawn = [gate.record for gate in gates(pruner)]
    passes = []
    for images in (x, x_adv):
        for gate, masks in zip(gates(pruner), drawn, strict=True):
            gate.record, gate.replay = None, iter(masks)
        with outputs_of(pruner.watched()) as features:
            passes.append((F.cross_entropy(model(images), y), features))
    (clean, before), (adversarial, after) = passes
    shift = sum((b - a).abs().mean() for a, b in zip(before, after, strict=True)) / len(before)
    expected = (clean + 2 * adversarial) / 3 + 0.5 * shift
    torch.testing.assert_close(loss, expected)
    assert shift > 0
    for parameter in model.parameters():
        (gradient,) = torch.autograd.grad(expected, parameter, retain_graph=True)
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    for gate in gates(pruner):
        (gradient,) = torch.autograd.grad(adversarial, gate.raw, retain_graph=True)
        torch.testing.assert_close(gate.raw.grad, gradient, rtol=1e-4, atol=1e-6)
    assert any(bool(gate.raw.grad.any()) for gate in gates(pruner))


def test_without_an_attack_the_vulnerability_is_zero() -> None:
    losses = []
    for weight in (0.0, 1e6):
        model, pruner = built("conv", vulnerability=weight)
        torch.manual_seed(1)
        losses.append(float(pruner.wrap(Natural())(model, *cases.batch()).detach()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)  # a shift of any size would stand out a millionfold


def test_the_features_are_outputs_of_activations_and_of_hidden_linear_layers() -> None:
    model, pruner = built("conv")
    watched = pruner.watched()
    assert watched == [model.features[2], model.features[6], model.classifier[1], model.classifier[0]]
    model, pruner = built("residual")  # whose activations are no modules
    assert pruner.watched() == [model.stem, model.conv1, model.conv2, model.shortcut]


def test_the_divergence_is_weighted_by_the_images_of_an_epoch_and_the_step_is_adams() -> None:
    model, pruner = built("conv", beta=3.0, mask_lr=0.02)
    pruner.start(Plan(epochs=2, steps=5, lr=0.1))
    optimizer = torch.optim.SGD(pruner.trainable(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    pruner.bind(optimizer)
    objective = pruner.wrap(PgdTraining(steps=1))
    twins = [nn.Parameter(gate.raw.detach().clone()) for gate in gates(pruner)]
    twin = torch.optim.Adam(twins, lr=0.02)
    for step in range(4):
        optimizer.zero_grad()
        x, y = cases.batch(seed=step)
        for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):  # accumulated: 16 images a step all the same
            (objective(model, part, labels) / 2).backward()
        for gate, parameter in zip(gates(pruner), twins, strict=True):
            (kl,) = torch.autograd.grad(3.0 * gate.divergence() / (16 * 5), gate.raw)
            parameter.grad = gate.raw.grad + kl
        pruner.after_backward()
        optimizer.step()
        pruner.after_step()
        twin.step()
        for gate, parameter in zip(gates(pruner), twins, strict=True):
            torch.testing.assert_close(gate.raw, parameter, rtol=1e-5, atol=1e-6)


def test_with_adam_as_the_optimiser_the_gradient_is_left_as_it_is() -> None:
    _, pruner = built("conv", beta=0.0)
    pruner.bind(torch.optim.AdamW(pruner.trainable(), lr=0.1))
    gate = gates(pruner)[0]
    gate.raw.grad = torch.full_like(gate.raw, 3.0)
    pruner.after_backward()
    torch.testing.assert_close(gate.raw.grad, torch.full_like(gate.raw, 3.0))


@pytest.mark.parametrize("case", cases.CASES)
def test_the_folded_network_equals_the_gated_one_in_eval_mode(case: str) -> None:
    model, pruner = built(case)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.3)
    scatter(pruner)
    x, _ = cases.batch()
    expected = model.eval()(x)
    assert torch.equal(model(x), expected), "deterministic"
    before, gated = copy.deepcopy(model.state_dict()), hooks(model)
    with pruner.exact():
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        inside, answer = copy.deepcopy(model.state_dict()), copy.deepcopy(pruner.masks())
        assert hooks(model) == 0, "so that the attack may take the fast path"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hooks(model) == gated > 0
    assert torch.equal(model(x), expected)
    finished = pruner.finish()
    assert hooks(model) == 0
    assert all(torch.equal(value, inside[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(finished[name], answer[name]) for name in answer)
    assert all(torch.equal(pruner.masks()[name], answer[name]) for name in answer)
    assert mask_ops.kept(finished) == pruner.total < sum(pruner.units.sizes)


def test_a_pruned_channel_leaves_only_its_constant() -> None:
    outputs = []
    for noise in (0.0, 100.0):
        model, pruner = built("grouped")
        scatter(pruner)
        off = [gate.average == 0 for gate in gates(pruner)]
        with torch.no_grad():  # the network behind is not to notice what a pruned channel computes
            model.net[0].weight[off[0]] += noise
            model.net[3].weight[off[1]] += noise
            model.net[3].bias[off[1]] += noise
        assert all(each.any() for each in off[:2])
        outputs.append(model.eval()(cases.batch()[0]))
        pruner.finish()
        outputs.append(model(cases.batch()[0]))
        assert not model.net[3].bias[off[1]].any()
        assert not model.net[0](cases.batch()[0])[:, off[0]].any()
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5)


def test_the_attack_sees_the_mean_network_and_stays_in_its_ball() -> None:
    model, pruner = built("conv")
    scatter(pruner)
    x, y = cases.batch()
    attack = Pgd(0.05, 0.02, 5, random_start=False)
    x_adv = attack(model, x, y)
    assert torch.equal(x_adv, attack(model, x, y))
    assert float((x_adv - x).abs().max()) <= 0.05 + 1e-6
    assert 0 <= float(x_adv.min()) <= float(x_adv.max()) <= 1
    model.eval()
    assert F.cross_entropy(model(x_adv), y) > F.cross_entropy(model(x), y)
    with pruner.exact():  # the attack's fast path
        torch.testing.assert_close(attack(model, x, y), x_adv, rtol=0, atol=1e-3)


def test_copies_have_their_own_gates() -> None:
    model, pruner = built("conv")
    x, _ = cases.batch()
    before = model.eval()(x)
    twin, learner = copy.deepcopy((model, pruner))
    scatter(learner)
    assert not torch.equal(twin(x), before)
    assert torch.equal(model(x), before)
    learner.finish()
    assert hooks(twin) == 0 < hooks(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), before)


def test_the_best_epoch_is_folded_once() -> None:
    model = cases.build("conv")
    pruner = AnpVs(Weights(model), keep=KEEP)
    states, scores = [], iter([1.0, 3.0, 2.0])

    def validate() -> dict[str, float]:
        states.append(copy.deepcopy(model.state_dict()))
        return {"robust": next(scores)}

    fitted = fit(model, Three(), PgdTraining(steps=1), pruner, epochs=3, lr=0.05, validate=validate, select="robust")
    assert fitted.epoch == 2
    assert all(torch.equal(value, states[1][name]) for name, value in model.state_dict().items())
    assert mask_ops.kept(fitted.masks) == pruner.total
    assert all(not w[~fitted.masks[n]].any() for n, w in zip(pruner.units.names, pruner.units.weights, strict=True))


def test_exact_leaves_a_finished_network_and_one_without_gates_as_they_are() -> None:
    model, pruner = built("conv")
    pruner.finish()
    state = copy.deepcopy(model.state_dict())
    with pruner.exact():
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model = cases.build("conv")
    pruner = AnpVs(Weights(model), keep=KEEP)  # the gates are registered by `start`
    state = copy.deepcopy(model.state_dict())
    with pruner.exact():
        assert sum(int(weight.count_nonzero()) for weight in pruner.units.weights) <= pruner.total
    assert hooks(model) == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_without_a_target_the_total_follows_the_masks() -> None:
    _, pruner = built("conv")
    assert pruner.total == mask_ops.kept(pruner.masks()) == sum(pruner.units.sizes)
    scatter(pruner)
    assert pruner.total == mask_ops.kept(pruner.masks()) < sum(pruner.units.sizes)
    for (i, gate), mask in zip(pruner.layers(), pruner.masks().values(), strict=True):
        live = mask.flatten(1).any(1) if mask.ndim > 2 else mask.any(0)
        assert torch.equal(live, gate.expected() > 1e-3), i
        whole = mask.flatten(1).all(1) if mask.ndim > 2 else mask.all(0)
        assert torch.equal(live, whole)
    with torch.no_grad():
        for gate in gates(pruner):
            gate.raw[0] = -10
            gate.raw[1] = 5
    pruner.after_step()
    masks = pruner.masks()
    assert [int(mask.sum()) for mask in masks.values()] == [27, 72, 16, 4], "never a whole layer"
    assert pruner.metrics() == {"units": 0.0}
    pruner.finish()
    assert all(weight[masks[name]].all() for name, weight in zip(masks, pruner.units.weights, strict=True))


def test_a_larger_weight_of_the_divergence_gives_more_sparsity() -> None:
    kept = []
    for beta in (1.0, 1e7):
        model = cases.build("conv")
        pruner = AnpVs(Weights(model), beta=beta, mask_lr=0.5)
        train(model, pruner, 30)
        kept.append(pruner.total)
    assert kept[1] < kept[0]


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("keep", [0.02, 0.1, 0.5, 1.0])
def test_a_target_takes_the_best_units_first(case: str, keep: float) -> None:
    _, pruner = built(case, keep=keep)
    scatter(pruner)
    answer = pruner.masks()
    assert mask_ops.kept(answer) == pruner.total == pruner.units.total(keep)
    kept, pruned = [], []
    for i, gate in pruner.layers():
        mask = answer[pruner.units.names[i]]
        rows = mask.flatten(1) if mask.ndim > 2 else mask.T
        expected = gate.expected()
        share = rows.double().mean(1)
        order = expected.argsort(descending=True, stable=True)
        assert torch.equal(share[order], share.sort(descending=True).values)
        assert int(((share > 0) & (share < 1)).sum()) <= 1, "one unit of a layer in part"
        best = torch.arange(len(order)) == order[0]
        kept += expected[(share == 1) & ~best].tolist()
        pruned += expected[(share < 1) & ~best].tolist()
        part = ((share > 0) & (share < 1)).nonzero()
        weight = pruner.units.weights[i].detach().abs()
        weight = weight.flatten(1) if mask.ndim > 2 else weight.T
        for unit in part.flatten().tolist():
            assert weight[unit][rows[unit]].min() >= weight[unit][~rows[unit]].max()
    if kept and pruned:  # beyond each layer's best, the network's best
        assert min(kept) >= max(pruned)


def test_equal_units_are_ranked_by_their_norms() -> None:
    model, pruner = built("residual", keep=0.3)
    for name, mask in list(pruner.masks().items())[:-1]:
        norms = model.get_parameter(name).detach().flatten(1).norm(dim=1)
        share = mask.flatten(1).double().mean(1)
        assert norms[share > 0].min() >= norms[share == 0].max()


@given(st.floats(0.2, 0.45))
def test_the_limits_of_layers_are_kept(keep: float) -> None:
    model = cases.build("conv")
    units = Weights(model, minimum={"features.0": 0.5}, maximum={"classifier.0": 0.05, "features.4": 0.7})
    for target in (keep, None):
        pruner = AnpVs(units, keep=target)
        scatter(pruner)
        counts = [int(mask.sum()) for mask in pruner.masks().values()]
        assert sum(counts) == pruner.total
        limits = zip(units.lower, counts, units.upper, strict=True)
        assert all(low <= count <= high for low, count, high in limits)


def test_the_smallest_possible_budget_is_met() -> None:
    units = Weights(cases.build("residual"), minimum={"*": 0.1})
    pruner = AnpVs(units, keep=sum(units.lower) / sum(units.sizes))
    scatter(pruner)
    assert pruner.total == sum(units.lower)
    assert [int(mask.sum()) for mask in pruner.masks().values()] == units.lower


def test_layers_without_gates_stay_dense_or_take_an_equal_share() -> None:
    _, pruner = built("transformer")
    named = [pruner.units.names[i] for i, _ in pruner.layers()]
    attention = [name for name in pruner.units.names if "self_attn" in name]
    assert len(attention) == 2
    assert set(named) == set(pruner.units.names) - set(attention)
    scatter(pruner)
    assert all(pruner.masks()[name].all() for name in attention)
    _, pruner = built("transformer", keep=0.25)
    assert [int(pruner.masks()[name].sum()) for name in attention] == [192, 64]
    _, pruner = built("tied")
    assert [pruner.units.names[i] for i, _ in pruner.layers()] == ["up.weight", "head.weight"], "no masks on pixels"
    assert [len(pruner.owners(i)) for i, _ in pruner.layers()] == [2, 1]
    with pytest.raises(ModelError, match="to gate"):
        AnpVs(Weights(nn.Sequential(nn.Flatten(), nn.Linear(192, 4))))


def test_standardised_images_are_mostly_outside_the_box() -> None:
    x = torch.rand(8, 3, 16, 16)
    standard = standardise(x)
    torch.testing.assert_close(standard.flatten(1).mean(1), torch.zeros(8), rtol=0, atol=1e-5)
    torch.testing.assert_close(standard.flatten(1).std(1, correction=0), torch.ones(8))
    assert float(((standard < 0) | (standard > 1)).float().mean()) > 0.6
    assert standardise(torch.full((1, 3, 4, 4), 0.3)).abs().max() < 1e-2
    net = nn.Flatten()
    assert torch.equal(Standardised(net)(x), net(standard))


def test_the_authors_attack_is_crippled() -> None:
    """It moves the image far out of its ball, but most of the change does not depend on the attack."""
    x, y = torch.rand(32, 3, 16, 16), torch.arange(32) % 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 2))
    standard, epsilon = standardise(x), 8 / 255
    crippled = CrippledPgd(epsilon, None, 10)(net, standard, y)
    assert 0 <= float(crippled.min()) <= float(crippled.max()) <= 1
    assert float((crippled - standard).abs().max()) > 10 * epsilon
    opposite = CrippledPgd(epsilon, None, 10)(net, standard, 1 - y)
    stuck = (standard < -epsilon) | (standard > 1 + epsilon)
    assert torch.equal(crippled[stuck], opposite[stuck])
    assert float(stuck.float().mean()) > 0.5

    def margin(logits: Tensor) -> float:
        return float((logits.gather(1, y[:, None]) - logits.gather(1, 1 - y[:, None])).mean().detach())

    honest = Pgd(epsilon)(Standardised(net), x, y)
    gain = margin(Standardised(net)(x)) - margin(Standardised(net)(honest))
    illusion = margin(net(standard.clamp(0, 1))) - margin(net(crippled))
    assert illusion < gain / 4


def test_standardised_training_is_on_standardised_images() -> None:
    model, pruner = built("conv", standardised=True)
    x, y = cases.batch()
    seen = []
    handle = model.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].detach()))
    pruner.wrap(PgdTraining(steps=2))(model, x, y)
    handle.remove()
    clean, attacked = seen[-2:]
    torch.testing.assert_close(clean, standardise(x))
    inner = (clean > 0) & (clean < 1)
    assert float((attacked - clean)[inner].abs().max()) <= 8 / 255 + 1e-6
    assert torch.equal(attacked, Ball(8 / 255).project(attacked, clean))
    with pytest.raises(ModelError, match="attacked images"):
        pruner.wrap(Natural())


@pytest.mark.parametrize(
    "options",
    [
        {"beta": -1.0},
        {"vulnerability": -1.0},
        {"temperature": 0.0},
        {"threshold": 1.0},
        {"threshold": -0.1},
        {"mask_lr": 0.0},
    ],
)
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError):
        AnpVs(Weights(cases.build("conv")), **options)


def test_a_loss_that_does_not_attack_is_refused() -> None:
    model, pruner = built("conv")
    with pytest.raises(ModelError, match="attacked images"):
        pruner.wrap(lambda model, x, y, forward=None: torch.zeros(()))
    with pytest.raises(ModelError, match=r"harp\.fit"):
        pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ModelError, match="no gate"):
        pruner.wrap(Natural())(model.eval(), *cases.batch())
