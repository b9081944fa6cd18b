"""Attacks on many images: in shards, through kills, and measured again at the end."""

import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Apgd, ApgdT, Attack, AutoAttackLite, Fgsm, Pgd, Square
from harp.attacks.batched import State, Stepwise
from harp.errors import Interrupted
from harp.evaluation import runner
from harp.evaluation.runner import AttackRun, Outcome
from harp.models.modes import Logits
from harp.system import files
from harp.system.distributed.peers import Alone
from harp.system.interrupt import Stop
from harp.system.tensors import load_tensors
from support import cases
from support.attacking import near_the_boundary

EPSILON = 0.08
T = TypeVar("T")


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network that gets most of its images right, and some of them wrong."""
    x, y = cases.batch(60)
    generator = torch.Generator().manual_seed(1)
    pattern = torch.rand(4, *x.shape[1:], generator=generator)
    x = (0.6 * x + 0.4 * pattern[y % 4]).clamp(0, 1)
    model, y = cases.build("conv"), y % 4
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), x, y


def run(trained: tuple[nn.Module, Tensor, Tensor], attack: Attack | None, **more: Any) -> Outcome:
    model, x, y = trained
    return AttackRun(model, x, y, attack, classes=10, **{"batch": 16, "seed": 3, **more}).run()


def facts(outcome: Outcome) -> Any:
    return [{key: part[key] for key in ("attack", "tried", "fooled", "left")} for part in outcome.parts]


ATTACKS = {
    "pgd": Pgd(EPSILON, steps=3),
    "apgd": Apgd(EPSILON, steps=8),
    "lite": AutoAttackLite(EPSILON),
    "square": Square(EPSILON, steps=30),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_ten_kills_change_nothing(
    trained: tuple[nn.Module, Tensor, Tensor], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHARD", 32 * trained[1][0].numel() * 4)  # two shards
    whole = run(trained, ATTACKS[name])
    path, kills, generator = tmp_path / "state.pt", 0, random.Random(name)
    outcome = None
    while outcome is None:
        stop = Stop()
        ticks = generator.randrange(1, 3 if name == "pgd" else 40) if kills < 10 else -1

        def progress(done: float, total: int, text: str, stop: Stop = stop, left: list[int] = [ticks]) -> None:  # noqa: B006 (it counts)
            left[0] -= 1
            stop.signal = signal.SIGTERM if left[0] == 0 else stop.signal

        try:
            torch.manual_seed(generator.randrange(99))  # nothing may depend on the caller's random numbers
            outcome = run(trained, ATTACKS[name], path=path, progress=progress, stop=stop)
        except Interrupted:
            assert path.exists()
            kills += 1
    assert kills > 0 and path.exists()  # until the result is written
    runner.forget(path)
    assert not list(tmp_path.iterdir())
    assert torch.equal(outcome.right, whole.right) and torch.equal(outcome.during, whole.during)
    assert facts(outcome) == facts(whole)


def test_without_an_attack_it_is_the_model(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    assert torch.equal(run(trained, None).right, model(x).argmax(1) == y)


def test_the_parts_of_an_ensemble_see_what_is_left(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    natural, outcome = run(trained, None), run(trained, AutoAttackLite(EPSILON))
    first, second = outcome.parts
    assert first["tried"] == int(natural.right.sum()) and second["tried"] == first["left"]
    assert second["left"] == int(outcome.during.sum())
    assert not bool((outcome.right & ~natural.right).any())
    assert first["words"] and second["words"] and first["seconds"] > 0


def test_an_ensemble_is_as_strong_as_its_parts(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    together = run(trained, AutoAttackLite(EPSILON)).right
    alone = run(trained, Apgd(EPSILON)).right & run(trained, ApgdT(EPSILON)).right
    assert int((together != alone).sum()) <= 1  # they draw other random numbers


def test_stored_images_are_what_was_counted(
    trained: tuple[nn.Module, Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = trained
    monkeypatch.setattr(runner, "SHARD", 32 * x[0].numel() * 4)
    outcome = run(trained, Apgd(EPSILON, steps=8), store=tmp_path, pictures=3)
    stored = [load_tensors(path)[0] for path in sorted(tmp_path.iterdir())]
    points = torch.cat([part["images"] for part in stored])
    assert len(stored) == 2 and points.shape == x.shape
    assert float((points - x).abs().max()) <= EPSILON + 1e-6
    assert torch.equal(model(points).argmax(1) == y, outcome.right)
    examples = outcome.examples
    assert len(examples["index"]) == 3 and torch.equal(examples["image"], x[examples["index"]])
    assert bool((examples["before"] == examples["label"]).all() and (examples["after"] != examples["label"]).all())


class Elsewhere(Alone):
    """One of several processes whose others work at other times: what they found comes from `shelf`."""

    def __init__(self, rank: int, world: int, shelf: list[Any], stop: Stop | None = None) -> None:
        self.rank, self.world, self.shelf, self.stop = rank, world, shelf, stop

    def meet(self, wait: Callable[[], None] = lambda: None) -> None:
        if self.stop is not None:  # it is stopped while it waits for the others
            self.stop.signal = signal.SIGTERM
        wait()

    def gather(self, value: T) -> list[T]:
        self.shelf.append(value)
        return self.shelf


@pytest.mark.parametrize(("name", "world"), [("pgd", 2), ("apgd", 3), ("square", 2)])
def test_portions_give_the_same_bits_in_any_process(
    trained: tuple[nn.Module, Tensor, Tensor], name: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FEWEST", 4)
    whole = run(trained, ATTACKS[name], pictures=5)
    shelf: list[Any] = []
    outcomes = []
    for rank in reversed(range(world)):  # the last one that asks sees what all have found
        peers = Elsewhere(rank, world, shelf)
        try:
            outcomes.append(run(trained, ATTACKS[name], pictures=5, peers=peers))
        except KeyError:
            assert rank > 0, "with what others found it should be whole"
    (outcome,) = outcomes
    done = [number for found in shelf for number in found]
    assert len(shelf) == world and sorted(done) == list(range(len(done))), "each portion is one process's"
    assert torch.equal(outcome.right, whole.right) and torch.equal(outcome.during, whole.during)
    assert facts(outcome) == facts(whole)
    assert outcome.examples.keys() == whole.examples.keys()
    assert all(torch.equal(outcome.examples[key], whole.examples[key]) for key in whole.examples)


@pytest.mark.parametrize("name", ["pgd", "apgd"])
def test_states_of_three_processes_continue_in_one_and_in_two(
    trained: tuple[nn.Module, Tensor, Tensor], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FEWEST", 4)
    whole = run(trained, ATTACKS[name])
    path = tmp_path / "state.pt"
    generator = random.Random(name)
    for rank in range(3):
        stop, left = Stop(), [generator.randrange(1, 30)]

        def progress(done: float, total: int, text: str, stop: Stop = stop, left: list[int] = left) -> None:
            left[0] -= 1
            stop.signal = signal.SIGTERM if left[0] == 0 else stop.signal

        with pytest.raises(Interrupted):
            more: dict[str, Any] = {"progress": progress, "stop": stop, "peers": Elsewhere(rank, 3, [], stop)}
            run(trained, ATTACKS[name], path=path, **more)
    assert len(list(tmp_path.iterdir())) == 3
    stop = Stop()
    with pytest.raises(Interrupted):  # the second of two processes is stopped again when it has finished
        run(trained, ATTACKS[name], path=path, stop=stop, peers=Elsewhere(1, 2, [], stop))
    outcome = run(trained, ATTACKS[name], path=path)
    assert torch.equal(outcome.right, whole.right) and torch.equal(outcome.during, whole.during)
    assert facts(outcome) == facts(whole)
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".state.pt.1.{files.HOST}.{dead.pid}.tmp").write_bytes(b"half of a state")
    runner.forget(path)
    assert not list(tmp_path.iterdir())


class Boaster(Stepwise):
    """Claims to have fooled every image at once, and has not touched it."""

    name, epsilon, norm = "boaster", EPSILON, "linf"

    def __init__(self, *, fast: bool) -> None:
        self.fast = fast

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        return {"points": x.clone()}

    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return torch.ones_like(y, dtype=torch.bool), torch.ones_like(y, dtype=torch.bool)

    def longest(self, classes: int) -> int:
        return 1


def test_the_attacks_own_count_is_kept_beside_the_result(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    outcome = run(trained, Boaster(fast=False))
    assert int(outcome.during.sum()) == 0
    assert torch.equal(outcome.right, run(trained, None).right)


@pytest.mark.parametrize("attack", [Apgd(0.2, steps=10), AutoAttackLite(0.2)])
def test_an_image_that_only_the_folded_network_gets_wrong_is_attacked(attack: Attack) -> None:
    model, x, y, _ = near_the_boundary()
    assert run((model, x, y), None).right.all()
    outcome = run((model, x, y), attack)
    assert outcome.parts[0]["tried"] == len(x)
    assert not outcome.right.any()


def test_an_ensemble_continues_where_only_the_folded_network_is_wrong() -> None:
    model, x, y, _ = near_the_boundary()

    @dataclass(frozen=True)
    class BoasterFirst(AutoAttackLite):
        def parts(self, classes: int) -> list[Stepwise]:
            return [Boaster(fast=True), Apgd(0.2, steps=10)]

    outcome = run((model, x, y), BoasterFirst(0.2))
    assert [(part["tried"], part["fooled"]) for part in outcome.parts] == [(len(x), 0), (len(x), len(x))]
    assert not outcome.right.any() and not outcome.during.any()


def test_an_attack_on_no_images_works(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    never = (y + 1) % 4  # not one label is right
    wrong = model(x).argmax(1) != never
    outcome = run((model, x[wrong], never[wrong]), AutoAttackLite(EPSILON))
    assert not bool(outcome.right.any()) and [part["tried"] for part in outcome.parts] == [0, 0]


def test_stronger_attacks_leave_fewer_images(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    attacks = [None, Fgsm(EPSILON), Pgd(EPSILON, steps=20), Apgd(EPSILON, steps=50), AutoAttackLite(EPSILON)]
    left = [int(run(trained, attack).right.sum()) for attack in attacks]
    assert left == sorted(left, reverse=True) and left[0] > left[-1], left
