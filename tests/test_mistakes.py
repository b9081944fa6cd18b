"""Likely mistakes of a user of the library: each works as it was meant, or ends in one line that says what is right."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import harp
from harp.data.dataset import Split
from harp.errors import BudgetError, DataError, Diverged, ModelError, RecipeError
from harp.pruning.masks import kept
from harp.pruning.methods import PRUNERS
from support import cases

CROSS_ENTROPY = nn.functional.cross_entropy


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "harp")


def model() -> nn.Module:
    return cases.build("conv")


def split() -> Split:
    return Split(*cases.batch(8))


def fit(
    *,
    batches: Any = None,
    objective: Any = None,
    pruner: Callable[[nn.Module], Any] = lambda net: harp.Harp(net, keep=0.1),
    net: nn.Module | None = None,
    epochs: Any = 1,
    **options: Any,
) -> harp.Fitted:
    net = model() if net is None else net
    batches = [cases.batch(8, seed) for seed in range(2)] if batches is None else batches
    return harp.fit(net, batches, objective or harp.Natural(), pruner(net), epochs=epochs, **options)


def attach(make: Callable[[nn.Module], Any], times: int = 1) -> None:
    net = model()
    optimizer, pruner = make(net), harp.Harp(net, keep=0.1)
    for _ in range(times):
        pruner.attach(optimizer)


def two_pruners() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    harp.Harp(net, keep=0.1).attach(optimizer)
    harp.Hydra(net, keep=0.1).attach(optimizer)


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def plain_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return CROSS_ENTROPY(net(x), y)


def schedule_before_two_groups() -> None:
    """Published HARP has a group of its own for the quotas, which the schedule would not know."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    harp.Harp(net, keep=0.1, published=True).attach(optimizer)


x, y = cases.batch(8)
other_masks = harp.Magnitude(cases.build("residual"), keep=0.1).masks()

# What is written, the exception, and words of its message.
REFUSED: dict[str, tuple[Callable[[], Any], type[harp.HarpError], Sequence[str]]] = {
    # How much is kept
    "keep 1": (lambda: harp.Harp(model(), keep=1), BudgetError, ["keep 1 means 100 %", 'did you mean "1%"?']),
    "keep 1 as text": (lambda: harp.Harp(model(), keep="1"), BudgetError, ['did you mean "1%"?']),
    "keep 1 of numpy": (lambda: harp.Harp(model(), keep=np.int64(1)), BudgetError, ['did you mean "1%"?']),
    "keep 5": (lambda: harp.Lamp(model(), keep=5), BudgetError, ["more than 100 %", 'did you mean "5%"?']),
    "keep 150%": (lambda: harp.Lamp(model(), keep="150%"), BudgetError, ["'150%'", "at most 1"]),
    "keep None": (lambda: harp.Hydra(model(), keep=None), BudgetError, ["keep None", "like 0.01"]),
    "keep True": (lambda: harp.Hydra(model(), keep=True), BudgetError, ["keep True"]),
    "keep NaN": (lambda: harp.Hydra(model(), keep=float("nan")), BudgetError, ["keep nan"]),
    "keep words": (lambda: harp.Hydra(model(), keep="a tenth"), BudgetError, ["'a tenth'", "like 0.01"]),
    "keep 0": (lambda: harp.Hydra(model(), keep=0), BudgetError, ["keep 0:", "above 0"]),
    "total of 1": (lambda: harp.Weights(model()).total(1), BudgetError, ['did you mean "1%"?']),
    "tandem": (lambda: harp.Tandem(model(), keep=1), BudgetError, ['did you mean "1%"?']),
    "bcs-p": (lambda: harp.BcsP(model(), keep=1), BudgetError, ['did you mean "1%"?']),
    "a recipe": (
        lambda: harp.load_recipe("digits", ["stages.1.pruner.keep=1"]),
        RecipeError,
        ["stages[1].pruner.keep", 'did you mean "1%"?'],
    ),
    "a study": (lambda: harp.load_study("digits", keep="10%,1"), BudgetError, ['did you mean "1%"?']),
    "strategy": (lambda: harp.Hydra(model(), 0.1, strategy=3), RecipeError, ["strategy 3", "uniform"]),
    # How large an attack is
    "epsilon 8": (lambda: harp.Pgd(epsilon=8), RecipeError, ["epsilon 8", "[0, 1]", "did you mean 8/255?"]),
    "epsilon 1": (lambda: harp.Ball(1), RecipeError, ["did you mean 1/255?"]),
    "epsilon 1000": (lambda: harp.Ball(1000), RecipeError, ["give less than 1"]),
    "epsilon as text": (lambda: harp.Pgd(epsilon="8"), RecipeError, ["did you mean 8/255?"]),
    "epsilon words": (lambda: harp.Pgd(epsilon="eight"), RecipeError, ["epsilon", "'eight' is no number"]),
    "step 2": (lambda: harp.Pgd(epsilon=8 / 255, step=2), RecipeError, ["step 2", "did you mean 2/255?"]),
    "epsilon of AutoAttack": (lambda: harp.AutoAttack(8), RecipeError, ["did you mean 8/255?"]),
    "epsilon of APGD": (lambda: harp.Apgd(8), RecipeError, ["did you mean 8/255?"]),
    "epsilon of FMN": (lambda: harp.Fmn(8), RecipeError, ["did you mean 8/255?"]),
    "epsilon in training": (lambda: harp.PgdTraining(epsilon=8), RecipeError, ["did you mean 8/255?"]),
    "step in training": (lambda: harp.Trades(step=2), RecipeError, ["did you mean 2/255?"]),
    "epsilon of Free-AT": (lambda: harp.FreeTraining(epsilon=4), RecipeError, ["did you mean 4/255?"]),
    "epsilon of Fast-AT": (lambda: harp.FastTraining(epsilon=8), RecipeError, ["did you mean 8/255?"]),
    "epsilon in a recipe": (
        lambda: harp.load_recipe("digits", ["objective.epsilon=8"]),
        RecipeError,
        ["objective", "did you mean 8/255?"],
    ),
    "epsilon of an evaluation": (
        lambda: harp.load_recipe("digits", ["evaluate.epsilon=8"]),
        RecipeError,
        ["evaluate.epsilon", "did you mean 8/255?"],
    ),
    "norm": (lambda: harp.Pgd(norm="Linf"), RecipeError, ["linf or l2", "'Linf'"]),
    "steps": (lambda: harp.Pgd(steps=2.5), RecipeError, ["steps", "whole number"]),
    # Attacks and accuracy
    "attack as a class": (
        lambda: harp.accuracy(model(), x, y, attack=harp.Pgd),
        RecipeError,
        ["Pgd (a class)", "harp.Pgd(steps=20)"],
    ),
    "unknown attack": (lambda: harp.accuracy(model(), x, y, attack="pdg-20"), RecipeError, ["'pdg-20'", "pgd"]),
    "labels forgotten": (lambda: harp.accuracy(model(), split(), None), DataError, ["Split(8", "two tensors"]),
    "channels last": (
        lambda: harp.accuracy(model(), x.permute(0, 2, 3, 1), y),
        ModelError,
        ["can't take images of shape (8, 8, 3)"],
    ),
    "attack on doubles": (
        lambda: harp.Pgd(steps=1)(model(), x.double(), y),
        DataError,
        ["torch.float64", "images.to(torch.float32)"],
    ),
    "attack on bytes": (lambda: harp.Pgd()(model(), (255 * x).byte(), y), DataError, ["[0, 1]", "uint8"]),
    "attack on arrays": (lambda: harp.Pgd()(model(), x.numpy(), y.numpy()), DataError, ["must be tensors"]),
    # Models, units and masks
    "model by name": (lambda: harp.Weights("resnet18"), ModelError, ["'resnet18'", "nn.Module"]),
    "model as a class": (lambda: harp.Weights(cases.ConvNet), ModelError, ["ConvNet (a class)"]),
    "units by name": (lambda: harp.Harp("resnet18", keep=0.1), RecipeError, ["'resnet18'", "harp.Weights(model)"]),
    "arguments swapped": (lambda: harp.Harp(0.1, model()), RecipeError, ["units 0.1"]),
    "channels of what": (lambda: harp.Channels(model(), 0.5), ModelError, ["batch of images"]),
    "masks of another model": (lambda: harp.Fixed(model(), other_masks), ModelError, ["masks of another model?"]),
    "masks as a file": (lambda: harp.Fixed(model(), "masks.safetensors"), ModelError, ["give a dict"]),
    "masks held in another model": (lambda: harp.hold_masks(model(), other_masks), ModelError, ["another model?"]),
    "the pruner as masks": (
        lambda: harp.apply_masks(model(), harp.Lamp(model(), 0.1)),
        ModelError,
        ["Lamp(keeps", "`pruner.masks()`"],
    ),
    "the pruner saved": (lambda: harp.save_masks("x", harp.Lamp(model(), 0.1)), ModelError, ["`pruner.masks()`"]),
    # Trainings
    "pruner of another": (lambda: fit(pruner=lambda net: harp.Harp(model(), 0.1)), ModelError, ["another ConvNet"]),
    "pruner forgotten": (lambda: fit(pruner=lambda net: None), RecipeError, ["pruner None", "harp.Dense(model)"]),
    "units as a pruner": (lambda: fit(pruner=harp.Weights), RecipeError, ["pruner Weights(2,456 weights"]),
    "pruner as a class": (lambda: fit(pruner=lambda net: harp.Harp), RecipeError, ["Harp (a class)"]),
    "half an epoch": (lambda: fit(epochs=1.5), RecipeError, ["epochs must be a whole number", "1.5"]),
    "epochs as text": (lambda: fit(epochs="2"), RecipeError, ["epochs must be a whole number", "'2'"]),
    "no parts": (lambda: fit(accumulate=0), RecipeError, ["accumulate"]),
    "negative rate": (lambda: fit(lr=-0.1), RecipeError, ["lr must be a number of 0 or more"]),
    "rate as text": (lambda: fit(lr="0.1"), RecipeError, ["lr must be a number", "'0.1'"]),
    "far too large a rate": (
        lambda: fit(lr=1e10, epochs=3, objective=harp.PgdTraining(steps=1), pruner=harp.Dense),
        Diverged,
        ["learning rate", "try a smaller one"],
    ),
    "no batches": (lambda: fit(batches=[]), DataError, ["batches are empty"]),
    "last batch dropped": (
        lambda: fit(batches=DataLoader(TensorDataset(x, y), 64, drop_last=True)),
        DataError,
        ["batches are empty"],
    ),
    "an empty batch": (lambda: fit(batches=[(x[:0], y[:0])]), DataError, ["0 images"]),
    "single examples": (lambda: fit(batches=TensorDataset(x, y)), RecipeError, ["TensorDataset", "DataLoader"]),
    "a split": (lambda: fit(batches=split()), RecipeError, ["Split", "harp.Batches"]),
    "one pair": (lambda: fit(batches=(x, y)), RecipeError, ["one pair of tensors", "a list of pairs"]),
    "a generator": (lambda: fit(batches=((x, y) for _ in range(2))), RecipeError, ["no length"]),
    "one-hot labels": (lambda: fit(batches=[(x, torch.eye(4)[y])]), DataError, ["one integer label", "(8, 4)"]),
    "a column of labels": (lambda: fit(batches=[(x, y[:, None])]), DataError, ["one integer label", "(8, 1)"]),
    "too few labels": (lambda: fit(batches=[(x, y[:3])]), DataError, ["one integer label", "(3,)"]),
    "a label too many": (lambda: fit(batches=[(x, y + 4)]), DataError, ["expected 0 to 3"]),
    "normalised images": (lambda: fit(batches=[((x - 0.5) / 0.2, y)]), DataError, ["belongs inside the model"]),
    "all frozen": (lambda: fit(net=frozen(), pruner=harp.Dense), ModelError, ["frozen", "requires_grad"]),
    "frozen and pruned": (
        lambda: fit(net=frozen(), pruner=lambda net: harp.Lamp(net, 0.1)),
        ModelError,
        ["frozen", "requires_grad"],
    ),
    "objective as a class": (lambda: fit(objective=harp.Mart), ModelError, ["Mart (a class)", "PgdTraining()"]),
    "objective by name": (lambda: fit(objective="trades"), ModelError, ["'trades'"]),
    "attack as objective": (lambda: fit(objective=harp.Pgd()), ModelError, ["can't be called as (model, x, y"]),
    "loss of torch": (lambda: fit(objective=nn.CrossEntropyLoss()), ModelError, ["can't be called as (model, x, y"]),
    "loss without forward": (lambda: fit(objective=plain_loss), ModelError, ["plain_loss", "forward=None"]),
    "unknown schedule": (lambda: fit(schedule="cosin"), RecipeError, ["'cosin'", "cosine"]),
    "schedule not made": (lambda: fit(schedule=harp.schedules.steps), RecipeError, ["steps", "steps([0.5])"]),
    "optimizer by name": (lambda: fit(optimizer="adam"), RecipeError, ["optimizer 'adam'"]),
    "optimizer of another": (
        lambda: fit(optimizer=torch.optim.SGD(model().parameters(), lr=0.1)),
        ModelError,
        ["steps no parameter of the ConvNet"],
    ),
    "select alone": (lambda: fit(select="robust"), RecipeError, ["select 'robust'", "validate"]),
    "validation of a number": (lambda: fit(validate=lambda: 0.5), RecipeError, ["validate returned 0.5", "dict"]),
    "validation not called": (lambda: fit(validate=0.5), RecipeError, ["validate 0.5", "function"]),
    # Batches
    "batches of a data set": (lambda: harp.Batches(harp.load_data("digits"), 64), DataError, ["data.train"]),
    "batches of tensors": (lambda: harp.Batches((x, y), 8), DataError, ["tuple(...)", "data.train"]),
    "batch of a fraction": (lambda: harp.Batches(split(), 64.0), RecipeError, ["64.0"]),
    "augment true": (lambda: harp.Batches(split(), 8, augment=True), RecipeError, ["harp.Augment"]),
    "batches of no epoch": (lambda: list(harp.Batches(split(), 8)), RecipeError, ["batches(epoch)"]),
    # A loop of one's own
    "optimizer of another model": (
        lambda: attach(lambda net: torch.optim.SGD(model().parameters(), lr=0.1)),
        ModelError,
        ["steps no parameter of the ConvNet", "parameters()"],
    ),
    "no optimizer": (lambda: attach(lambda net: net), RecipeError, ["optimizer ConvNet(...)", "torch.optim.SGD"]),
    "LBFGS": (lambda: attach(lambda net: torch.optim.LBFGS(net.parameters())), RecipeError, ["LBFGS", "SGD or Adam"]),
    "attached twice": (
        lambda: attach(lambda net: torch.optim.SGD(net.parameters(), lr=0.1), times=2),
        RecipeError,
        ["attached already", "finish()"],
    ),
    "two pruners": (two_pruners, RecipeError, ["attached to this optimiser already", "finish()"]),
    "schedule of other groups": (schedule_before_two_groups, RecipeError, ["attach the pruner first"]),
    # Files
    "no run": (lambda: harp.load_run("nowhere"), harp.HarpError, ["nowhere is no run"]),
    "no masks": (lambda: harp.load_masks("nowhere"), harp.HarpError, ["can't read nowhere"]),
    "no data set": (lambda: harp.load_data("cifar"), DataError, ["did you mean cifar10?"]),
    "no model": (
        lambda: harp.build_model("resnet19", num_classes=10, shape=(3, 32, 32)),
        ModelError,
        ["did you mean 'resnet18'?"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_ends_in_one_line(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written, kind, words = REFUSED[mistake]
    with pytest.raises(kind) as caught:
        written()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    for word in words:
        assert word in message


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    CROSS_ENTROPY(net(x), y).backward()
    optimizer.step()


def equal(*results: harp.Fitted) -> bool:
    first, *others = results
    return all(torch.equal(first.masks[name], other.masks[name]) for other in others for name in first.masks)


@pytest.mark.parametrize("name", sorted(set(PRUNERS) - {"dense", "fixed"}))
def test_every_method_takes_a_model_and_text(name: str) -> None:
    pruners = [PRUNERS[name](units, keep=keep) for units, keep in ((model(), "10%"), (harp.Weights(model()), 0.1))]
    assert pruners[0].total == pruners[1].total
    masks = [pruner.masks() for pruner in pruners]
    assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())


def test_all_can_be_kept_on_purpose() -> None:
    for keep in (1.0, "100%", "1.0", "1/1"):
        assert kept(harp.Lamp(model(), keep=keep).masks()) == harp.Weights(model()).size


def test_numbers_as_in_recipes() -> None:
    assert harp.Pgd("8/255", "2/255") == harp.Pgd(8 / 255, 2 / 255)
    assert harp.PgdTraining(epsilon="8/255", step="0.01") == harp.PgdTraining(epsilon=8 / 255, step=0.01)
    assert harp.FreeTraining(epsilon="4/255") == harp.FreeTraining() and harp.Ball("0.5") == harp.Ball(0.5)
    assert harp.FastTraining(epsilon="8/255") == harp.FastTraining() and harp.Apgd("8/255") == harp.Apgd()
    assert repr(harp.Pgd("8/255")) == repr(harp.Pgd()), "it is part of hashes"
    assert harp.Pgd(epsilon=3, norm="l2").epsilon == 3, "Euclidean distances may be above 1"
    assert harp.Fmn().epsilon == float("inf")


def test_an_attack_by_its_name() -> None:
    net = model()
    named, made = (harp.accuracy(net, x, y, attack=attack) for attack in ("pgd-3", harp.Pgd(steps=3)))
    assert named == made


def test_a_schedule_by_its_name() -> None:
    assert equal(fit(schedule="constant"), fit(schedule=harp.schedules.constant))
    rates = [fit(schedule=name, epochs=2).history[-1]["lr"] for name in ("constant", "cosine", "steps")]
    assert len(set(rates)) == 3


@pytest.mark.parametrize(
    "given",
    {
        "bytes": lambda: ((255 * x).round().byte(), y),
        "doubles": lambda: (x.double(), y),
        "arrays": lambda: (x.numpy(), y.numpy()),
        "short labels": lambda: (x, y.int()),
        "lists": lambda: (x, y.tolist()),
    }.items(),
    ids=lambda item: item[0],
)
def test_images_and_labels_of_other_types(given: tuple[str, Callable[[], Any]]) -> None:
    net, like = model(), model()
    objective = harp.PgdTraining(steps=1)
    fit(net=net, batches=[given[1]()], objective=objective)
    images = (255 * x).round() / 255 if given[0] == "bytes" else x
    fit(net=like, batches=[(images, y)], objective=objective)
    for ours, theirs in zip(net.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_optimizer_of_the_model_is_used_and_given_back() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.8, weight_decay=1e-4)
    fitted = fit(net=net, optimizer=optimizer)
    same = model()
    assert equal(fitted, fit(net=same, lr=0.05, momentum=0.8, weight_decay=1e-4))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(net.parameters(), same.parameters(), strict=True))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    assert optimizer.param_groups[0]["lr"] == 0.05 and len(optimizer.param_groups) == 1
    one_step(net, optimizer)


def test_a_frozen_network_can_be_pruned_by_scores() -> None:
    assert kept(fit(net=frozen()).masks) == 246


def test_nothing_is_trained_in_no_epochs() -> None:
    for name in sorted(set(PRUNERS) - {"dense", "fixed"}):
        fitted = fit(epochs=0, pruner=lambda net, name=name: PRUNERS[name](net, keep=0.5), objective=harp.PgdTraining())
        assert kept(fitted.masks) <= 1228, name


def test_a_stopped_training_leaves_the_model_trainable() -> None:
    net = model()

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(net=net, on_step=stop)
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_a_model_that_moved_takes_its_pruner_along() -> None:
    net = model()
    pruner = harp.Lamp(net, keep=0.1)
    net.to("meta")
    pruner.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    assert {mask.device.type for mask in pruner.masks().values()} == {"meta"}


SHORT: dict[str, Callable[[], Any]] = {
    "Weights(2,456 weights in 4 layers of ConvNet)": lambda: harp.Weights(model()),
    "Channels(24 channels in 2 groups of Sequential, 176,772 FLOPs)": lambda: channels(),
    "Harp(keeps 25 of 2,456 weights, 1.02 %)": lambda: harp.Harp(model(), keep="1%"),
    "AnpVs(keeps what its masks leave)": lambda: harp.AnpVs(model()),
    "Dense(keeps 2,456 of 2,456 weights, 100 %)": lambda: harp.Dense(model()),
    "Fitted(kept 246 of 2,456 (10 %), 3 epochs, best epoch 3)": lambda: fit(epochs=3),
    "Fitted(kept 246 of 2,456 (10 %), 1 epoch)": lambda: fit(pruner=lambda net: harp.Lamp(net, 0.1)),
    "Split(8 images of 3x8x8, float32)": lambda: split(),
    "Batches(2 batches of 4 of Split(8 images of 3x8x8, float32))": lambda: harp.Batches(split(), 4),
    "Natural()": lambda: harp.Natural(),
    "Free(FreeTraining(epsilon=0.01568627450980392, step=None, replays=4, fresh=False))": lambda: (
        harp.FreeTraining().begin()
    ),
}


def channels() -> harp.Channels:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    return harp.Channels(net, x[:2])


@pytest.mark.parametrize("expected", SHORT)
def test_objects_are_shown_in_a_line(expected: str) -> None:
    assert repr(SHORT[expected]()) == expected
