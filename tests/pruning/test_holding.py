"""Masks hold after a pruning: no optimiser moves a pruned weight, until they are lifted."""

import copy
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import harp
from harp.pruning import holding
from harp.pruning.masks import Masks, kept
from harp.pruning.methods import PRUNERS
from support import cases

Parameters = Iterator[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for seed in range(steps):
        x, y = cases.batch(8, seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def outside(net: nn.Module, masks: Masks) -> int:
    """How many pruned weights are not zero."""
    return sum(int(net.get_parameter(name)[~mask].count_nonzero()) for name, mask in masks.items())


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("name", sorted(set(PRUNERS) - {"anp-vs", "dense", "dnr", "fixed", "flying-bird+", "mad"}))
def test_the_same_loop_fine_tunes_what_is_left(name: str) -> None:
    net = cases.build("conv")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    train(net, optimizer)  # there is momentum of the dense training
    pruner = PRUNERS[name](net, keep=0.1).attach(optimizer)
    train(net, optimizer)
    pruner.after_epoch()
    masks = pruner.finish()
    assert outside(net, masks) == 0
    before = values(net)
    train(net, optimizer)
    assert outside(net, masks) == 0
    moved = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == set(before), "kept weights, biases and norms are trained"
    assert all(torch.equal(mask, pruner.masks()[key]) for key, mask in masks.items()), "the masks stay"
    now = values(net)
    pruner.finish()
    assert all(torch.equal(value, now[key]) for key, value in net.state_dict().items()), "a second call moves nothing"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_new_optimiser_moves_them(optimizer: str) -> None:
    net = cases.build("conv")
    masks = harp.Lamp(net, keep=0.1).finish()
    train(net, OPTIMIZERS[optimizer](net.parameters()))
    assert outside(net, masks) == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_neither_does_the_momentum_of_an_older_one(optimizer: str) -> None:
    net = cases.build("conv")
    older = OPTIMIZERS[optimizer](net.parameters())
    train(net, older)
    masks = harp.Lamp(net, keep=0.1).finish()
    train(net, older)
    assert outside(net, masks) == 0


def test_pruned_weights_have_no_gradient_in_a_step() -> None:
    """So they do not enter the momentum, which would come back when the masks are lifted."""
    net = cases.build("conv")
    masks = harp.Lamp(net, keep=0.1).finish()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer)
    for name, mask in masks.items():
        assert not optimizer.state[net.get_parameter(name)]["momentum_buffer"][~mask].any()


def test_they_hold_after_fit_too() -> None:
    net = cases.build("conv")
    fitted = harp.fit(net, [cases.batch()], harp.Natural(), harp.Harp(net, keep="10%"), epochs=1)
    train(net, torch.optim.Adam(net.parameters()))
    assert outside(net, fitted.masks) == 0 and kept(fitted.masks) == 246


def test_they_are_lifted_on_purpose() -> None:
    net = cases.build("conv")
    masks = harp.Lamp(net, keep=0.1).finish()
    harp.lift_masks(net)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert outside(net, masks) > 1000


@pytest.mark.parametrize("again", [harp.Dense, lambda net: harp.Random(net, keep=0.1, seed=5)], ids=["dense", "sparse"])
@pytest.mark.parametrize("own_loop", [True, False])
def test_another_pruner_decides_anew(again: Callable[[nn.Module], harp.Pruner], own_loop: bool) -> None:
    net = cases.build("conv")
    masks = harp.Lamp(net, keep=0.1).finish()
    pruner = again(net)
    if own_loop:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        pruner.attach(optimizer)
        train(net, optimizer)
        new = pruner.finish()
    else:
        new = harp.fit(net, [cases.batch()], harp.Natural(), pruner, epochs=2).masks
    assert outside(net, masks) > 0
    train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert outside(net, new) == 0


def test_a_copy_holds_them_and_a_model_of_its_own_does_not() -> None:
    net, other = cases.build("conv"), cases.build("conv")
    masks = harp.Lamp(net, keep=0.1).finish()
    nested = copy.deepcopy(nn.Sequential(net))
    twin = copy.deepcopy(net)
    for copied, inner in ((twin, twin), (nested, nested[0])):
        train(copied, torch.optim.Adam(copied.parameters()))
        assert outside(inner, masks) == 0
    harp.lift_masks(twin)
    train(net, torch.optim.Adam(net.parameters()))
    assert outside(net, masks) == 0, "lifted in the copy only"
    train(other, torch.optim.Adam(other.parameters()))
    assert outside(other, masks) > 1000


def test_files_are_those_of_an_ordinary_model(tmp_path: Path) -> None:
    net, plain = cases.build("conv"), cases.build("conv")
    masks = harp.Lamp(net, keep=0.1).finish()
    assert list(net.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(net.state_dict())
    small = nn.Sequential(nn.Linear(4, 4))
    harp.Lamp(small, keep=0.5).finish()
    torch.save(small, tmp_path / "small.pt")
    code = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False);"
        "print(int(model[0].weight.count_nonzero()), any(name.startswith('harp') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "small.pt")], capture_output=True, text=True)
    assert done.stdout.split() == ["8", "False"], done.stderr

    loaded = cases.build("conv")
    loaded.load_state_dict(net.state_dict())
    harp.hold_masks(loaded, masks)
    train(loaded, torch.optim.Adam(loaded.parameters()))
    assert outside(loaded, masks) == 0


def test_nothing_stays_of_a_model_that_is_gone() -> None:
    net = cases.build("conv")
    harp.Lamp(net, keep=0.1).finish()
    gc.collect()
    count = len(holding._HELD)
    del net
    gc.collect()
    assert len(holding._HELD) == count - 1


def test_a_weight_of_another_shape_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    harp.Lamp(net, keep=0.5).finish()
    net[0] = nn.Linear(4, 8)
    net[1] = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    assert net[0].weight.all() and net[1].weight.all()


# The optimiser of a loop of one's own


def test_settings_of_groups_and_other_parameters_stay() -> None:
    net, head = cases.build("conv"), nn.Linear(4, 4)
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    others = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}, {"params": head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    before = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
    pruner = harp.Hydra(net, keep=0.1).attach(optimizer)
    scores, norms, kept_head = optimizer.param_groups
    assert (scores["lr"], scores["weight_decay"]) == (0.1, 0.1) and len(scores["params"]) == 4 + 2
    assert (norms["lr"], norms["weight_decay"]) == (0.5, 0) and len(norms["params"]) == 2, "of norms, only they"
    assert [id(p) for p in kept_head["params"]] == before[2]["params"], "another model's are trained on"
    pruner.finish()
    assert [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups] == before


@pytest.mark.parametrize("made_before", [True, False])
@pytest.mark.parametrize(
    "schedule",
    [lambda o: CosineAnnealingLR(o, 8), lambda o: OneCycleLR(o, 0.2, total_steps=8)],
    ids=["cosine", "one-cycle"],
)
def test_a_schedule_goes_on_through_pruning_and_fine_tuning(
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], made_before: bool
) -> None:
    def rates(pruned: bool) -> list[float]:
        net = cases.build("conv")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = schedule(optimizer) if made_before or not pruned else None
        pruner = harp.Harp(net, keep=0.1).attach(optimizer) if pruned else None
        scheduler = scheduler or schedule(optimizer)
        found = []
        for epoch in range(6):
            if epoch == 3 and pruner is not None:
                pruner.finish()
            train(net, optimizer, 1)
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert rates(True) == rates(False)


def test_a_step_with_a_closure_is_the_same_step() -> None:
    x, y = cases.batch(8)
    nets = [cases.build("conv") for _ in range(2)]
    for net, with_closure in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        pruner = harp.Hydra(net, keep=0.1).attach(optimizer)

        def loss(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            torch.manual_seed(0)
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(net(x), y)
            value.backward()
            return value

        for _ in range(3):
            if with_closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
        pruner.finish()
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def test_a_pruner_can_be_attached_after_another_has_finished() -> None:
    net = cases.build("conv")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for keep in (0.5, 0.1):
        pruner = harp.Hydra(net, keep=keep).attach(optimizer)
        train(net, optimizer)
        masks = pruner.finish()
    train(net, optimizer)
    assert outside(net, masks) == 0 and kept(masks) == 246
