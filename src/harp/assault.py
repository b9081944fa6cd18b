"""An attack on many images, in processes that may be killed at any moment.

The images go through in *portions*, whose size follows from their number and not from that of the processes: each
portion is one process's, and what is found for an image is the same however many there are. Within a portion an attack
in steps runs each of its parts on the images that are still classified correctly, through a batch that is refilled; any
other attack is called for one batch. The state is written now and then, by each process for itself, and what goes on
from it ends with the same bits, in another number of processes too. Whatever the attack believes to have found is
classified once more by the plain model, in fixed batches: that is the outcome, and what the attack believed is kept
beside it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harp import checkpoint, files
from harp.answers import as_input, example_of, predicted
from harp.attacks import Attack, check_number, images_in_box
from harp.attacks.stepwise import Packing, Stepwise
from harp.errors import CheckpointError, DiskError, Interrupted
from harp.frozen import frozen
from harp.keeper import Stop
from harp.processes.peers import Alone
from harp.seeds import derive

logger = logging.getLogger("harp")

BATCH = 256
"""Images that are asked about at a time, unless told otherwise."""

_SHARD = 2**26  # bytes of images that are attacked together
_PORTIONS = 8  # at least, so that a few processes have as much to do as each other
_FEWEST = 32  # images that are worth a portion
_SECONDS = 15.0  # between two states, or more where writing one takes long


class Progress(Protocol):
    """Shows how far an attack has come."""

    def __call__(self, done: float, total: int, text: str) -> None:
        """So many images of all are done, by what `text` names."""


@dataclass
class Outcome:
    """What an attack came to: which images are still right, by the model and by the attack's own account."""

    right: Tensor
    during: Tensor
    parts: list[dict[str, Any]]  # of an ensemble: what each attack tried and fooled, and how long it took
    seconds: float = 0.0
    examples: dict[str, Tensor] = field(default_factory=dict)  # a few images that were right and no longer are
    witnessed: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))  # right by the witness


@dataclass
class _Portion:
    """How far the images that are under attack have come."""

    points: Tensor
    fooled: Tensor
    facts: list[dict[str, Any]]  # of each attack that has begun
    part: int = 0  # the attack of an ensemble that comes next
    packing: dict[str, Any] | None = None  # its state, if it has begun


@dataclass
class _Found:
    """What a portion came to."""

    right: Tensor
    during: Tensor
    witnessed: Tensor
    facts: list[dict[str, Any]]
    examples: dict[str, Tensor]


class Assault:
    """An attack on images (bytes, or numbers in [0, 1]); without one, the images as they are.

    Arguments:
        classes: how many the network knows.
        path: takes the state; call `forget` once what came of it is written.
        store: a folder that takes all adversarial images, portion by portion.
        pictures: how many successful ones to keep in the outcome.
        witness: another network, which is shown what was found for this one.
        peers: the processes that do this together; all must call it, and all get the whole outcome.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        attack: Attack | None,
        *,
        classes: int,
        batch: int = BATCH,
        seed: int = 0,
        path: Path | None = None,
        store: Path | None = None,
        pictures: int = 0,
        witness: nn.Module | None = None,
        progress: Progress = lambda done, total, text: None,
        stop: Stop | None = None,
        peers: Alone | None = None,
    ) -> None:
        check_number("batch", batch, whole=True, least=1)
        self.model, self.images, self.labels, self.attack = model, images, labels, attack
        self.batch, self.seed, self.path, self.store, self.wanted = batch, seed, path, store, pictures
        self.witness, self.progress, self.stop, self.peers = witness, progress, stop or Stop(), peers or Alone()
        self.like = example_of(model, images)
        self.attacks = parts(attack, classes)
        self.words = [{"attack": a.name, "words": a.words(classes)} for a in self.attacks]
        self.size = self._size()
        self.count = -(-len(images) // self.size)
        self.found: dict[int, _Found] = {}
        self.begun: dict[int, _Portion] = {}
        self.before = 0  # images that were done by an earlier call
        self.done = 0  # and by this process since
        self.spent = 0.0  # seconds of earlier calls
        self.began = self.saved = self.looked = time.monotonic()
        self.pause = 0.0  # seconds between two looks at whether to stop, lately
        self.cost = 0.0  # seconds that writing the last state took

    def _size(self) -> int:
        """The images of a portion: whatever the number of processes, the same."""
        if not self.attacks:
            return self.batch  # whose random numbers are those of one call
        image = self.images[0].numel() * self.like.element_size()
        most = max(1, _SHARD // (image * self.batch)) * self.batch
        return min(most, 2 * self.batch, max(_FEWEST, -(-len(self.images) // _PORTIONS)))

    def run(self) -> Outcome:
        """Attack what has not been attacked yet."""
        self._load()
        finished = self.peers.first(sorted(self.found))  # the first process's word counts: others may see more by now
        self.before = sum(len(self._images(number)) for number in finished)
        left = [number for number in range(self.count) if number not in finished]
        for number in left[self.peers.rank :: self.peers.world]:
            self.found[number] = self._portion(number)
            self.begun.pop(number, None)
            self.done += len(self._images(number))
            self._tick("", 0)
        if self.peers.world > 1:
            self._save()
            self.peers.meet(lambda: self._tick("", 0))
        return self._whole()

    def _images(self, number: int) -> range:
        """The images of a portion."""
        return range(len(self.images))[number * self.size : (number + 1) * self.size]

    def _portion(self, number: int) -> _Found:
        """Attack a portion from where it stands."""
        here = self._images(number)
        x = as_input(self.images[here.start : here.stop], self.like)
        y = self.labels[here.start : here.stop].to(self.like.device, torch.long)
        points = self._attack(number, x, y)
        after = self._predict(points)
        portion = self.begun.get(number)
        during = ~portion.fooled if portion is not None else after == y
        shown = (
            torch.ones(0, dtype=torch.bool) if self.witness is None else self._shown(self.witness, points) == y.cpu()
        )
        if self.store is not None and self.attack is not None:
            tensors = {"images": points, "labels": y, "predictions": after}
            checkpoint.save_tensors(self.store / f"{number:04d}.safetensors", tensors)
        facts = [] if portion is None else portion.facts
        return _Found((after == y).cpu(), during.cpu(), shown, facts, self._examples(number, x, y, points, after))

    def _attack(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        """A point for each image."""
        if self.attack is None:
            return x
        if not self.attacks:
            with seeded(derive(self.seed, "evaluate", number), self.like.device):
                return self.attack(self.model, x, y)
        x = images_in_box(x, y)
        if number not in self.begun:
            self.begun[number] = _Portion(x.clone(), self._predict(x) != y, [])
        portion = self.begun[number]
        with torch.inference_mode(False), torch.no_grad(), frozen(self.model, x, fast=self.attacks[0].fast) as net:
            while portion.part < len(self.attacks):
                self._run_part(net, number, x, y, portion)
        return portion.points

    def _run_part(self, net: Callable[[Tensor], Tensor], number: int, x: Tensor, y: Tensor, portion: _Portion) -> None:
        """Let one attack in steps try the images that none before has fooled."""
        attack = self.attacks[portion.part]
        if len(portion.facts) == portion.part:
            portion.facts.append({"tried": 0, "fooled": 0, "seconds": 0.0})
        facts = portion.facts[portion.part]
        left = (~portion.fooled).nonzero().flatten()
        packing = Packing(attack, net, x[left], y[left], batch=self.batch, seed=derive(self.seed, "shard", number))
        if portion.packing is not None:
            packing.load(portion.packing)
        before, began = facts["seconds"], time.monotonic()

        def after_step() -> None:
            facts["seconds"] = before + time.monotonic() - began
            portion.packing = packing.state()
            self._tick(attack.name, len(x) - len(left) + packing.progress())

        packing.run(after_step)
        fooled = packing.fooled
        better = fooled if portion.part else torch.ones_like(fooled)  # of who holds out, the first attack's best point
        portion.points[left[better]] = packing.points[better]
        portion.fooled[left[fooled]] = True
        facts |= {"tried": len(left), "fooled": int(fooled.sum())}
        portion.part, portion.packing = portion.part + 1, None

    def _predict(self, x: Tensor) -> Tensor:
        """The classes that the plain model gives, -1 where its logits are not finite."""
        starts = range(0, len(x), self.batch)
        return torch.cat([predicted(self.model, x[start : start + self.batch]) for start in starts])

    def _shown(self, witness: nn.Module, points: Tensor) -> Tensor:
        """The classes that the witness gives."""
        like = example_of(witness, points)
        starts = range(0, len(points), self.batch)
        return torch.cat([predicted(witness, as_input(points[s : s + self.batch], like)).cpu() for s in starts])

    def _examples(self, number: int, x: Tensor, y: Tensor, points: Tensor, after: Tensor) -> dict[str, Tensor]:
        """A few images that were right and no longer are, as far as earlier portions have not enough of them."""
        had = sum(len(found.examples.get("index", ())) for at, found in self.found.items() if at < number)
        if self.attack is None or had >= self.wanted:
            return {}
        clean = self._predict(x)
        chosen = ((clean == y) & (after != y)).nonzero().flatten()[: self.wanted]
        rows = {"index": chosen + self._images(number).start, "image": x[chosen], "attacked": points[chosen]}
        rows |= {"label": y[chosen], "before": clean[chosen], "after": after[chosen]}
        return {key: value.cpu() for key, value in rows.items()}

    def _whole(self) -> Outcome:
        """What all portions of all processes came to."""
        found = {number: part for each in self.peers.gather(self.found) for number, part in each.items()}
        portions = [found[number] for number in range(self.count)]
        facts: list[dict[str, Any]] = [
            {**words, "tried": 0, "fooled": 0, "left": 0, "seconds": 0.0} for words in self.words
        ]
        for portion in portions:
            for whole, part in zip(facts, portion.facts, strict=True):
                whole |= {key: whole[key] + part[key] for key in ("tried", "fooled", "seconds")}
                whole["left"] = whole["tried"] - whole["fooled"]
        shown = [portion.examples for portion in portions if portion.examples]
        examples = {key: torch.cat([each[key] for each in shown])[: self.wanted] for key in (shown[0] if shown else ())}
        nobody = torch.ones(0, dtype=torch.bool)
        return Outcome(
            torch.cat([nobody, *(portion.right for portion in portions)]),
            torch.cat([nobody, *(portion.during for portion in portions)]),
            facts,
            self.peers.first(self.spent + time.monotonic() - self.began),
            examples,
            torch.cat([nobody, *(portion.witnessed for portion in portions)]),
        )

    def _tick(self, text: str, done: float) -> None:
        """Show how many images are done, `done` of the portion that is under way; write the state if it is time."""
        mine = self.done + done
        self.peers.tell(mine)
        every = self.peers.done()
        self.progress(self.before + (mine if every is None else every), len(self.images), text)
        now = time.monotonic()
        self.pause, self.looked = max(now - self.looked, 0.9 * self.pause), now
        self.stop.reserve = 2 * (self.pause + self.cost)
        if self.stop.signal is not None or now - self.saved > max(_SECONDS, 20 * self.cost):
            self._save()
        if self.stop.signal is not None:
            raise Interrupted("stopped in an attack; the state is saved", self.stop.signal)

    def _save(self) -> None:
        """Write this process's state."""
        now = time.monotonic()
        if self.path is not None:
            found = {number: dict(vars(part)) for number, part in self.found.items()}
            begun = {number: dict(vars(part)) for number, part in self.begun.items()}
            spent = self.spent + now - self.began
            path = self.path if self.peers.rank == 0 else _beside(self.path, self.peers.rank)
            try:
                checkpoint.save_state(path, {"size": self.size, "found": found, "begun": begun, "seconds": spent})
            except DiskError as error:
                if self.stop.signal is not None:
                    raise DiskError(f"stopped in an attack, but its state is NOT saved: {error}") from error
                logger.warning("%s; the attack goes on", error)
        self.saved = time.monotonic()
        self.cost = self.saved - now

    def _load(self) -> None:
        """Take up what any process has left, of this number of them or another."""
        for path in _states(self.path):
            if not path.exists():
                continue
            try:
                state = checkpoint.load_state(path)
            except CheckpointError as error:
                logger.warning("%s; what it held is measured again", error)
                continue
            if state.get("size") != self.size:
                raise CheckpointError(f"{path} is the state of another version: delete it to measure anew")
            self.found |= {number: _Found(**part) for number, part in state["found"].items()}
            self.spent = max(self.spent, state["seconds"])
            for number, part in state["begun"].items():
                known = self.begun.get(number)
                portion = _Portion(**part)
                if known is None or known.part < portion.part:
                    portion.points = portion.points.to(self.like.device)
                    portion.fooled = portion.fooled.to(self.like.device)
                    self.begun[number] = portion
        self.begun = {number: portion for number, portion in self.begun.items() if number not in self.found}


def forget(path: Path) -> None:
    """Remove the states of an attack, whose result is in a file of its own by now, and what kills left of them."""
    for each in _states(path):
        files.remove(each)


def _states(path: Path | None) -> list[Path]:
    """Where the processes leave their states."""
    if path is None:
        return []
    others = [each for each in path.parent.glob(f"{path.name}.*") if each.suffix[1:].isdigit()]
    return [path, *sorted(others)]


def _beside(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.{rank}")


def parts(attack: Attack | None, classes: int) -> list[Stepwise]:
    """The attacks in steps that an attack consists of, if it does."""
    if isinstance(attack, Stepwise):
        return [attack]
    ensemble: Callable[[int], list[Stepwise]] = getattr(attack, "parts", lambda classes: [])
    return ensemble(classes)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of the CPU and of the device from a seed; afterwards they go on as if nothing was drawn."""
    accelerators = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=accelerators, device_type=kind):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach devices that were not forked
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif accelerators:
            getattr(torch, kind).manual_seed(seed)
        yield
