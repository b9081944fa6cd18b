"""Segmentation, tokens, several inputs and regression: pruned like image classification, to the weight."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.errors import DataError, ModelError, RecipeError
from harp.pruning.channels import Channels
from harp.pruning.methods import PRUNERS, Dense, Fixed, Harp, Pruner
from harp.pruning.units import Weights
from harp.training.base import Objective
from harp.training.loop import Fitted, fit
from harp.training.objectives import Natural, PgdTraining
from support import tasks
from support.methods import Memory

METHODS = ("harp", "hydra", "magnitude", "lamp")


def trained(task: str, method: str, keeper: Memory | None = None, **options: Any) -> tuple[nn.Module, Pruner, Fitted]:
    model, (_, objective, select) = tasks.build(task), tasks.TASKS[task]
    pruner = PRUNERS[method](Weights(model), keep=0.2)
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.01, "validate": tasks.Batches(task), "select": select, **options}
    return model, pruner, fit(model, tasks.Batches(task), objective(), pruner, keeper=keeper or Memory(), **settings)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_task_is_pruned_to_the_exact_budget(task: str, method: str) -> None:
    model, pruner, fitted = trained(task, method)
    units = pruner.units
    assert sum(int(mask.sum()) for mask in fitted.masks.values()) == pruner.total == units.total(0.2)
    for name, mask in fitted.masks.items():
        assert not model.get_parameter(name)[~mask].any()
    select = tasks.TASKS[task][2]
    assert fitted.history[fitted.epoch - 1][select] == max(record[select] for record in fitted.history)
    fixed = Fixed(units, fitted.masks)
    history = fit(model, tasks.Batches(task), tasks.TASKS[task][1](), fixed, epochs=3, lr=0.01).history
    assert history[-1]["loss"] < history[0]["loss"]
    assert sum(int(weight.count_nonzero()) for weight in units.weights) <= pruner.total


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_resumed_training_of_every_task_is_the_same_to_the_bit(task: str) -> None:
    expected, _, fitted = trained(task, "harp")
    for stop_after in (2, 5):
        keeper = Memory(stop_after)
        with pytest.raises(InterruptedError):
            trained(task, "harp", keeper)
        model, _, again = trained(task, "harp", Memory(state=keeper.state))
        assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())
        assert [{**r, "seconds": 0} for r in again.history] == [{**r, "seconds": 0} for r in fitted.history]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_harp_follows_the_paths_with_the_inputs_of_the_batch(task: str) -> None:
    _, pruner, _ = trained(task, "harp")
    assert isinstance(pruner, Harp)
    assert pruner._paths is not None and pruner._paths.count > 0


@pytest.mark.parametrize("task", tasks.TASKS)
def test_accumulated_parts_give_the_gradient_of_the_batch(task: str) -> None:
    def losses(accumulate: int) -> list[float]:
        model = tasks.build(task)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0
                module.eval()
        objective = tasks.TASKS[task][1]()
        batches = [tasks.batch(task)]
        fitted = fit(model, batches, objective, Dense(Weights(model)), epochs=3, lr=0.01, accumulate=accumulate)
        return [record["loss"] for record in fitted.history]

    whole, parts = losses(1), losses(3)
    tolerance = 1e-5 if task != "segmentation" else 0.2  # batch norms see the parts
    assert parts == pytest.approx(whole, rel=tolerance)


class Ragged(Objective):
    """Every tensor of a batch has a length of its own."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        return batch, None

    def __call__(self, model: nn.Module, x: Any, y: Any, forward: Any = None) -> Tensor:
        return (forward or model)(*x).sum()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(left).mean(0) * self.linear(right).mean(0)


def test_tensors_of_different_lengths_can_be_trained_on_but_not_split() -> None:
    model, batches = Both(), [(torch.rand(3, 4), torch.rand(5, 4))]
    fitted = fit(model, batches, Ragged(), Harp(Weights(model), keep=0.5), epochs=1, lr=0.01)
    assert sum(int(mask.sum()) for mask in fitted.masks.values()) == 8
    with pytest.raises(RecipeError, match=r"accumulate 2 splits .* give 1"):
        fit(model, batches, Ragged(), Dense(Weights(model)), epochs=1, lr=0.01, accumulate=2)


def test_without_a_measure_the_last_epoch_is_kept_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Both()
    batches = [(torch.rand(3, 4), torch.rand(3, 4))]
    with caplog.at_level(logging.WARNING, "harp"):
        fitted = fit(model, batches, Ragged(), Dense(Weights(model)), epochs=2, lr=0.01, validate=batches)
    assert fitted.epoch == 2
    assert [record.message for record in caplog.records] == [
        "not validated, and the last epoch is kept: the objective does not say what it measures on held-out batches "
        "(`harp.Objective.measure`)"
    ]
    with pytest.raises(RecipeError, match="can't select an epoch by 'error': the objective does not say"):
        fit(model, batches, Ragged(), Dense(Weights(model)), epochs=2, validate=batches, select="error")
    with pytest.raises(RecipeError, match="select 'error': nothing measures it, so give `validate` too"):
        fit(model, batches, Ragged(), Dense(Weights(model)), epochs=2, select="error")


def test_measures_are_means_over_the_examples_of_all_held_out_batches() -> None:
    model = tasks.build("regression").eval()
    x, y = tasks.batch("regression")
    held = [(x[:6], y[:6]), (x[6:], y[6:])]
    fitted = fit(model, [(x, y)], tasks.Squares(), Dense(Weights(model)), epochs=1, lr=0.01, validate=held)
    assert fitted.history[0]["negative_error"] == pytest.approx(-float(F.mse_loss(model(x), y).detach()), rel=1e-5)


def test_images_are_validated_with_the_attack_of_the_objective() -> None:
    from support import cases

    model, batches = cases.build("conv"), [cases.batch()]
    units = Weights(model)
    history = fit(model, batches, PgdTraining(steps=1), Dense(units), epochs=1, lr=0.01, validate=batches).history
    assert 0 <= history[0]["robust"] <= history[0]["natural"] <= 1
    assert "robust" not in fit(model, batches, Natural(), Dense(units), epochs=1, lr=0.01, validate=batches).history[0]


@pytest.mark.parametrize("task", ["tokens", "pair"])
def test_image_objectives_say_what_they_are_for(task: str) -> None:
    model = tasks.build(task)
    with pytest.raises(DataError, match=r"give images and labels, or an objective of your own \(harp.Objective\)"):
        fit(model, [tasks.batch(task)], PgdTraining(steps=1), Dense(Weights(model)), epochs=1)


def test_an_image_objective_needs_logits() -> None:
    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.linear(x.flatten(1))}

    model = Answer()
    with pytest.raises(ModelError, match=r"must return logits of shape .* not dict"):
        fit(model, [(torch.rand(2, 3, 2, 2), torch.arange(2))], Natural(), Dense(Weights(model)), epochs=1)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: {"loss": x.sum()}, "the objective returned dict, expected the loss of the batch"),
        (lambda x: x, r"the objective returned a tensor of shape \(8, 2\) and torch.float32"),
        (lambda x: x.sum().long(), "torch.int64"),
        (lambda x: None, "NoneType"),
    ],
)
def test_what_is_no_loss_is_refused(returned: Any, message: str) -> None:
    model = tasks.build("regression")
    with pytest.raises(ModelError, match=message):
        fit(
            model,
            tasks.Batches("regression"),
            lambda m, x, y, forward=None: returned(m(x)),
            Dense(Weights(model)),
            epochs=1,
        )


@pytest.mark.parametrize(
    ("method", "options", "advice"),
    [
        ("flying-bird+", {}, "FlyingBirdPlus is for classification, .* use FlyingBird"),
        ("dnr", {}, "Dnr is for classification, .* clean_weight=0"),
    ],
)
def test_methods_with_a_cross_entropy_of_their_own_say_so(method: str, options: Any, advice: str) -> None:
    model = tasks.build("regression")
    with pytest.raises(ModelError, match=advice):
        fit(model, tasks.Batches("regression"), tasks.Squares(), PRUNERS[method](Weights(model), keep=0.2), epochs=1)


def test_mad_needs_an_attack() -> None:
    model = tasks.build("regression")
    with pytest.raises(ModelError, match="MAD needs an objective with an `attack`"):
        fit(model, tasks.Batches("regression"), tasks.Squares(), PRUNERS["mad"](Weights(model), keep=0.2), epochs=1)


def test_every_other_method_prunes_a_regression() -> None:
    for method in PRUNERS.keys() - {"mad", "anp-vs", "flying-bird+", "dnr", "dense", "fixed"}:
        model = tasks.build("regression")
        pruner = PRUNERS[method](Weights(model), keep=0.2)
        fitted = fit(model, tasks.Batches("regression"), tasks.Squares(), pruner, epochs=1, lr=0.01)
        assert sum(int(mask.sum()) for mask in fitted.masks.values()) == pruner.total, method


@pytest.mark.parametrize("task", ["segmentation", "pair", "regression"])
def test_channels_of_every_task_can_be_cut(task: str) -> None:
    model = tasks.build(task)
    objective = tasks.TASKS[task][1]()
    x, _ = objective.split(tasks.batch(task))
    units = Channels(model, x, budget="macs")
    pruner = PRUNERS["magnitude"](units, keep=0.5)
    fitted = fit(model, tasks.Batches(task), objective, pruner, epochs=1, lr=0.01)
    assert units.spent(fitted.masks) <= pruner.total
    small = units.slim(model, fitted.masks)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_channels_of_a_transformer_on_tokens() -> None:
    model = tasks.build("tokens")
    units = Channels(model, tasks.batch("tokens")[0], budget="parameters")
    assert any("linear2" in name for space in units.spaces for name in space.readers)
    masks = PRUNERS["magnitude"](units, keep=0.8).finish()
    assert units.slim(model, masks)(tasks.batch("tokens")[0]).shape == (8, 3)


def test_channels_of_a_detector_with_two_heads_on_two_levels() -> None:
    torch.manual_seed(0)
    model, images = tasks.Detector().eval(), torch.rand(2, 3, 16, 16)
    units = Channels(model, images, budget="flops")
    readers = {name for space in units.spaces for name in space.readers}
    assert {"smooth.weight", "classes.0.weight", "boxes.0.weight", "classes.2.weight", "boxes.2.weight"} <= readers
    pruner = PRUNERS["magnitude"](units, keep=0.4)
    masks = pruner.finish()
    assert units.spent(masks) <= pruner.total
    small = units.slim(model, masks)
    expected, found = model(images), small(images)
    assert small.get_parameter("smooth.weight").numel() < model.get_parameter("smooth.weight").numel()
    for head in ("classes", "boxes"):
        for ours, theirs in zip(found[head], expected[head], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
