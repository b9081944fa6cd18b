"""An attack on many images, in a process that may be killed at any moment.

The images go through in shards of bounded memory. An attack in steps runs each of its parts on the images that are
still classified correctly, through a batch that is refilled; any other attack is called batch by batch. The state is
written now and then, and what goes on from it ends with the same bits. Whatever the attack believes to have found is
classified once more by the plain model, in fixed batches: that is the outcome, and what the attack believed is kept
beside it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harp import checkpoint
from harp.answers import as_input, example_of, predicted
from harp.attacks import Attack, check_number, images_in_box
from harp.attacks.stepwise import Packing, Stepwise
from harp.errors import Interrupted
from harp.frozen import frozen
from harp.keeper import Stop
from harp.seeds import derive

_SHARD = 2**26  # bytes of images that are attacked together
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
class _Shard:
    """How far the images that are under attack have come."""

    points: Tensor
    fooled: Tensor
    part: int = 0  # the attack of an ensemble, or the batch, that comes next
    packing: dict[str, Any] | None = None  # its state, if it has begun


class Assault:
    """An attack on images (bytes, or numbers in [0, 1]); without one, the images as they are.

    Arguments:
        classes: how many the network knows.
        path: takes the state; it is removed at the end.
        store: a folder that takes all adversarial images, shard by shard.
        pictures: how many successful ones to keep in the outcome.
        witness: another network, which is shown what was found for this one.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        attack: Attack | None,
        *,
        classes: int,
        batch: int = 256,
        seed: int = 0,
        path: Path | None = None,
        store: Path | None = None,
        pictures: int = 0,
        witness: nn.Module | None = None,
        progress: Progress = lambda done, total, text: None,
        stop: Stop | None = None,
    ) -> None:
        check_number("batch", batch, whole=True, least=1)
        self.model, self.images, self.labels, self.attack = model, images, labels, attack
        self.batch, self.seed, self.path, self.store, self.wanted = batch, seed, path, store, pictures
        self.witness, self.progress, self.stop = witness, progress, stop or Stop()
        self.like = example_of(model, images)
        image = images[0].numel() * self.like.element_size()
        self.size = max(1, _SHARD // (image * batch)) * batch  # whole batches
        self.attacks = parts(attack, classes)
        facts = [{"attack": a.name, "words": a.words(classes), "tried": 0, "fooled": 0} for a in self.attacks]
        nobody = torch.ones(0, dtype=torch.bool)
        self.outcome = Outcome(nobody, nobody, [{**fact, "left": 0, "seconds": 0.0} for fact in facts])
        self.number = 0
        self.shard: _Shard | None = None
        self.began = self.saved = time.monotonic()
        self.cost = 0.0  # seconds that writing the last state took

    def run(self) -> Outcome:
        """Attack what has not been attacked yet."""
        if self.path is not None and self.path.exists():
            self._load(checkpoint.load_state(self.path))
        while self.number * self.size < len(self.images):
            start = self.number * self.size
            x = as_input(self.images[start : start + self.size], self.like)
            y = self.labels[start : start + self.size].to(self.like.device, torch.long)
            points = self._attack(x, y)
            after = self._predict(points)
            during = ~self.shard.fooled if self.shard is not None and self.attacks else after == y
            self._remember(start, x, y, points, after)
            self.outcome.right = torch.cat([self.outcome.right, (after == y).cpu()])
            self.outcome.during = torch.cat([self.outcome.during, during.cpu()])
            if self.witness is not None:
                shown = self._shown(self.witness, points) == y.cpu()
                self.outcome.witnessed = torch.cat([self.outcome.witnessed, shown])
            self.number, self.shard = self.number + 1, None
            self._save_if_due()
        self.outcome.seconds = self._seconds()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        return self.outcome

    def _attack(self, x: Tensor, y: Tensor) -> Tensor:
        """A point for each image."""
        if self.attack is None:
            return x
        if self.attacks:
            x = images_in_box(x, y)
        if self.shard is None:
            fooled = self._predict(x) != y if self.attacks else torch.zeros_like(y, dtype=torch.bool)
            self.shard = _Shard(x.clone(), fooled)
        shard = self.shard
        if self.attacks:
            with torch.inference_mode(False), torch.no_grad(), frozen(self.model, x, fast=self.attacks[0].fast) as net:
                while shard.part < len(self.attacks):
                    self._run_part(net, x, y, shard)
            return shard.points
        for start in range(shard.part * self.batch, len(x), self.batch):
            here = slice(start, start + self.batch)
            index = self.number * self.size // self.batch + shard.part
            with seeded(derive(self.seed, "evaluate", index), self.like.device):
                shard.points[here] = self.attack(self.model, x[here], y[here])
            shard.part += 1
            self._tick(getattr(self.attack, "name", ""), min(start + self.batch, len(x)))
        return shard.points

    def _run_part(self, net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, shard: _Shard) -> None:
        """Let one attack in steps try the images that none before has fooled."""
        attack, facts = self.attacks[shard.part], self.outcome.parts[shard.part]
        left = (~shard.fooled).nonzero().flatten()
        packing = Packing(attack, net, x[left], y[left], batch=self.batch, seed=derive(self.seed, "shard", self.number))
        if shard.packing is not None:
            packing.load(shard.packing)
        before, began = facts["seconds"], time.monotonic()

        def after_step() -> None:
            facts["seconds"] = before + time.monotonic() - began
            shard.packing = packing.state()
            self._tick(attack.name, len(x) - len(left) + packing.progress())

        packing.run(after_step)
        fooled = packing.fooled
        better = fooled if shard.part else torch.ones_like(fooled)  # of who holds out, the first attack's best point
        shard.points[left[better]] = packing.points[better]
        shard.fooled[left[fooled]] = True
        facts["tried"] += len(left)
        facts["fooled"] += int(fooled.sum())
        facts["left"] = facts["tried"] - facts["fooled"]
        shard.part, shard.packing = shard.part + 1, None

    def _predict(self, x: Tensor) -> Tensor:
        """The classes that the plain model gives, -1 where its logits are not finite."""
        found = []
        for start in range(0, len(x), self.batch):
            found.append(predicted(self.model, x[start : start + self.batch]))
            if self.attack is None:
                self._tick("", min(start + self.batch, len(x)))
        return torch.cat(found)

    def _shown(self, witness: nn.Module, points: Tensor) -> Tensor:
        """The classes that the witness gives."""
        like = example_of(witness, points)
        starts = range(0, len(points), self.batch)
        return torch.cat([predicted(witness, as_input(points[s : s + self.batch], like)).cpu() for s in starts])

    def _remember(self, start: int, x: Tensor, y: Tensor, points: Tensor, after: Tensor) -> None:
        """Keep a few examples, and all points where they are wanted."""
        if self.store is not None and self.attack is not None:
            tensors = {"images": points, "labels": y, "predictions": after}
            checkpoint.save_tensors(self.store / f"{self.number:04d}.safetensors", tensors)
        missing = self.wanted - len(self.outcome.examples.get("index", ()))
        if self.attack is None or missing <= 0:
            return
        clean = self._predict(x)
        found = ((clean == y) & (after != y)).nonzero().flatten()[:missing]
        news = {"index": found + start, "image": x[found], "attacked": points[found]}
        news |= {"label": y[found], "before": clean[found], "after": after[found]}
        old = self.outcome.examples
        self.outcome.examples = {
            key: torch.cat([old[key], rows.cpu()]) if key in old else rows.cpu() for key, rows in news.items()
        }

    def _tick(self, text: str, done: float) -> None:
        """Show how many of the shard's images are done."""
        self.progress(self.number * self.size + done, len(self.images), text)
        self._save_if_due()

    def _save_if_due(self) -> None:
        """Write the state now and then, and when somebody asks to stop."""
        now = time.monotonic()
        if self.stop.signal is None and now - self.saved < max(_SECONDS, 20 * self.cost):
            return
        if self.path is not None:
            checkpoint.save_state(self.path, self._state())
        self.saved = time.monotonic()
        self.cost = self.saved - now
        if self.stop.signal is not None:
            raise Interrupted("stopped in an attack; the state is saved", self.stop.signal)

    def _seconds(self) -> float:
        return self.outcome.seconds + time.monotonic() - self.began

    def _state(self) -> dict[str, Any]:
        shard = None if self.shard is None else dict(vars(self.shard))
        return {"number": self.number, "shard": shard, "outcome": {**vars(self.outcome), "seconds": self._seconds()}}

    def _load(self, state: dict[str, Any]) -> None:
        self.number, self.outcome = state["number"], Outcome(**state["outcome"])
        if state["shard"] is not None:
            self.shard = _Shard(**state["shard"])
            self.shard.points = self.shard.points.to(self.like.device)
            self.shard.fooled = self.shard.fooled.to(self.like.device)


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
