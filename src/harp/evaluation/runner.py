"""An attack on many images, in processes that may be killed at any moment.

The images are split into *portions*. Their size depends on the number of images and not on the number of processes, so
the result for an image is the same for any number of processes. One process attacks one portion at a time. A stepwise
attack runs each of its parts on the images that are still classified correctly, in a batch that is refilled; any other
attack is called once for a batch. Each process saves its own state from time to time. A resumed attack ends with the
same bits, also in another number of processes. At the end the plain model classifies the adversarial images once more,
in fixed batches: that is the outcome. The attack's own count is kept beside it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp.attacks import Attack, check_number, images_in_box
from harp.attacks.batched import Packing, Stepwise
from harp.attacks.fast_forward import frozen
from harp.errors import CheckpointError, DiskError, Interrupted
from harp.evaluation.predict import as_input, example_of, predicted_in_batches
from harp.system import files
from harp.system.distributed.peers import Alone
from harp.system.interrupt import Stop
from harp.system.seeds import derive
from harp.system.tensors import load_state, save_state, save_tensors

logger = logging.getLogger("harp")

BATCH = 256
"""The default number of images in a batch."""

SHARD = 2**26  # bytes of images that are attacked together
_PORTIONS = 8  # the least number of portions, so that a few processes get equal shares
FEWEST = 32  # the least number of images in a portion
SECONDS = 15.0  # the least time between two saved states; more where saving one takes long

Progress = Callable[[float, int, str], None]
"""Shows the progress: the number of images that are done, the number of all, and the name of the attack."""


@dataclass
class Outcome:
    """The result of an attack: which images are still classified correctly, one flag for each image."""

    right: Tensor  # by the plain model, after the attack
    during: Tensor  # by the attack's own count
    parts: list[dict[str, Any]]  # for each attack of an ensemble: images tried, images fooled, seconds
    seconds: float
    examples: dict[str, Tensor]  # a few images that are misclassified only when attacked
    witnessed: Tensor  # by the witness; empty if there is none


@dataclass
class _PortionState:
    """The state of a portion that is under attack. The field names are keys in the saved file."""

    points: Tensor
    fooled: Tensor  # by the attacks' own count
    facts: list[dict[str, Any]]  # of each attack that was started
    part: int = 0  # the number of the current attack of an ensemble
    packing: dict[str, Any] | None = None  # the state of that attack, if it was started


@dataclass
class _PortionResult:
    """The result of a portion. The field names are keys in the saved file."""

    right: Tensor
    during: Tensor
    witnessed: Tensor
    facts: list[dict[str, Any]]
    examples: dict[str, Tensor]


class AttackRun:
    """An attack on images (bytes, or numbers in [0, 1]); without one, the images as they are.

    Arguments:
        classes: the number of classes of the network.
        path: the file of the state; call `forget` when the outcome is written.
        store: a folder for all adversarial images, one file for each portion.
        pictures: the number of successful adversarial images to keep in the outcome.
        witness: another network, which classifies the same adversarial images.
        peers: the processes that share the work; all must call this, and all get the whole outcome.
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
        self.batch, self.seed, self.path, self.store, self.pictures = batch, seed, path, store, pictures
        self.witness, self.progress, self.stop, self.peers = witness, progress, stop or Stop(), peers or Alone()
        self.like = example_of(model, images)
        self.attacks = parts(attack, classes)
        self.descriptions = [{"attack": a.name, "words": a.words(classes)} for a in self.attacks]
        self.size = self._size()
        self.count = -(-len(images) // self.size)
        self.results: dict[int, _PortionResult] = {}
        self.in_progress: dict[int, _PortionState] = {}
        self.done_before = 0  # images that an earlier call has done
        self.done = 0  # images that this process has done in this call
        self.seconds_before = 0.0  # of earlier calls
        self.started = self.last_save = self.last_tick = time.monotonic()
        self.tick_seconds = 0.0  # the longest time between two ticks, which decays
        self.save_seconds = 0.0  # the time that the last save took

    def _size(self) -> int:
        """The number of images in a portion; it does not depend on the number of processes."""
        if not self.attacks:
            return self.batch  # one call of the attack, with random numbers of its own
        image = self.images[0].numel() * self.like.element_size()
        most = max(1, SHARD // (image * self.batch)) * self.batch
        return min(most, 2 * self.batch, max(FEWEST, -(-len(self.images) // _PORTIONS)))

    def run(self) -> Outcome:
        """Attack the portions that are not done yet, and return the outcome of all."""
        self._load()
        # All processes use the first one's list: a process that looks later may see more states on disk.
        finished = self.peers.first(sorted(self.results))
        self.done_before = sum(len(self._images(number)) for number in finished)
        left = [number for number in range(self.count) if number not in finished]
        for number in left[self.peers.rank :: self.peers.world]:
            self.results[number] = self._portion(number)
            self.in_progress.pop(number, None)
            self.done += len(self._images(number))
            self._tick("", 0)
        if self.peers.world > 1:
            self._save()
            self.peers.meet(lambda: self._tick("", 0))
        return self._gather()

    def _images(self, number: int) -> range:
        """The indices of a portion's images."""
        return range(len(self.images))[number * self.size : (number + 1) * self.size]

    def _portion(self, number: int) -> _PortionResult:
        """Attack a portion, from its saved state if there is one."""
        indices = self._images(number)
        x = as_input(self.images[indices.start : indices.stop], self.like)
        y = self.labels[indices.start : indices.stop].to(self.like.device, torch.long)
        points = self._attack(number, x, y)
        after, y = predicted_in_batches(self.model, points, self.batch), y.cpu()
        state = self.in_progress.get(number)
        during = ~state.fooled.cpu() if state is not None else after == y
        witnessed = torch.ones(0, dtype=torch.bool)
        if self.witness is not None:
            witnessed = predicted_in_batches(self.witness, points, self.batch) == y
        if self.store is not None and self.attack is not None:
            tensors = {"images": points, "labels": y, "predictions": after}
            save_tensors(self.store / f"{number:04d}.safetensors", tensors)
        facts = [] if state is None else state.facts
        return _PortionResult(after == y, during, witnessed, facts, self._examples(number, x, y, points, after))

    def _attack(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        """An attacked image for each image of a portion."""
        if self.attack is None:
            return x
        if not self.attacks:
            with seeded(derive(self.seed, "evaluate", number), self.like.device):
                return self.attack(self.model, x, y)
        x = images_in_box(x, y)
        if number not in self.in_progress:
            wrong = predicted_in_batches(self.model, x, self.batch).to(y.device) != y
            self.in_progress[number] = _PortionState(x.clone(), wrong, [])
        state = self.in_progress[number]
        with torch.inference_mode(False), torch.no_grad(), frozen(self.model, x, fast=self.attacks[0].fast) as net:
            while state.part < len(self.attacks):
                self._run_part(net, number, x, y, state)
        return state.points

    def _run_part(
        self, net: Callable[[Tensor], Tensor], number: int, x: Tensor, y: Tensor, state: _PortionState
    ) -> None:
        """Run one stepwise attack on the images that no earlier attack has fooled."""
        attack = self.attacks[state.part]
        if len(state.facts) == state.part:
            state.facts.append({"tried": 0, "fooled": 0, "seconds": 0.0})
        facts = state.facts[state.part]
        left, seed = (~state.fooled).nonzero().flatten(), derive(self.seed, "shard", number)
        packing = Packing(attack, net, x[left], y[left], batch=self.batch, seed=seed, model=self.model)
        if state.packing is not None:
            packing.load(state.packing)
        seconds_before, started = facts["seconds"], time.monotonic()

        def after_step() -> None:
            facts["seconds"] = seconds_before + time.monotonic() - started
            state.packing = packing.state()
            self._tick(attack.name, len(x) - len(left) + packing.progress())

        packing.run(after_step)
        # An image that no attack fools keeps the first attack's best point.
        replaced = packing.fooled if state.part else torch.ones_like(packing.fooled)
        state.points[left[replaced]] = packing.points[replaced]
        state.fooled[left[packing.fooled]] = True
        facts |= {"tried": len(left), "fooled": int(packing.fooled.sum())}
        state.part, state.packing = state.part + 1, None

    def _examples(self, number: int, x: Tensor, y: Tensor, points: Tensor, after: Tensor) -> dict[str, Tensor]:
        """A few images that are misclassified only when attacked; none if earlier portions have enough of them."""
        earlier = [result for portion, result in self.results.items() if portion < number]
        if self.attack is None or sum(len(result.examples.get("index", ())) for result in earlier) >= self.pictures:
            return {}
        clean = predicted_in_batches(self.model, x, self.batch)
        chosen = ((clean == y) & (after != y)).nonzero().flatten()[: self.pictures]
        rows = {"index": chosen + self._images(number).start, "image": x[chosen], "attacked": points[chosen]}
        rows |= {"label": y[chosen], "before": clean[chosen], "after": after[chosen]}
        return {key: value.cpu() for key, value in rows.items()}

    def _gather(self) -> Outcome:
        """The outcome over all portions of all processes."""
        by_process = self.peers.gather(self.results)
        by_number = {number: result for results in by_process for number, result in results.items()}
        portions = [by_number[number] for number in range(self.count)]
        facts: list[dict[str, Any]] = [
            {**description, "tried": 0, "fooled": 0, "left": 0, "seconds": 0.0} for description in self.descriptions
        ]
        for portion in portions:
            for total, part in zip(facts, portion.facts, strict=True):
                total |= {key: total[key] + part[key] for key in ("tried", "fooled", "seconds")}
                total["left"] = total["tried"] - total["fooled"]
        pictures = [portion.examples for portion in portions if portion.examples]
        keys = pictures[0] if pictures else ()
        examples = {key: torch.cat([picture[key] for picture in pictures])[: self.pictures] for key in keys}
        empty = torch.ones(0, dtype=torch.bool)  # there may be no portions
        return Outcome(
            torch.cat([empty, *(portion.right for portion in portions)]),
            torch.cat([empty, *(portion.during for portion in portions)]),
            facts,
            self.peers.first(self.seconds_before + time.monotonic() - self.started),
            examples,
            torch.cat([empty, *(portion.witnessed for portion in portions)]),
        )

    def _tick(self, text: str, done: float) -> None:
        """Show the progress, with `done` images of the current portion; save the state when it is due, or stop."""
        own = self.done + done
        self.peers.tell(own)
        of_all = self.peers.done()
        self.progress(self.done_before + (own if of_all is None else of_all), len(self.images), text)
        now = time.monotonic()
        self.tick_seconds, self.last_tick = max(now - self.last_tick, 0.9 * self.tick_seconds), now
        self.stop.reserve = 2 * (self.tick_seconds + self.save_seconds)
        if self.stop.signal is not None or now - self.last_save > max(SECONDS, 20 * self.save_seconds):
            self._save()
        if self.stop.signal is not None:
            raise Interrupted("stopped in an attack; the state is saved", self.stop.signal)

    def _save(self) -> None:
        """Write this process's state."""
        now = time.monotonic()
        if self.path is not None:
            results = {number: dict(vars(result)) for number, result in self.results.items()}
            in_progress = {number: dict(vars(portion)) for number, portion in self.in_progress.items()}
            seconds = self.seconds_before + now - self.started
            rank = self.peers.rank
            path = self.path if rank == 0 else self.path.with_name(f"{self.path.name}.{rank}")
            try:
                save_state(path, {"size": self.size, "found": results, "begun": in_progress, "seconds": seconds})
            except DiskError as error:
                if self.stop.signal is not None:
                    raise DiskError(f"stopped in an attack, but its state is NOT saved: {error}") from error
                logger.warning("%s; the attack goes on", error)
        self.last_save = time.monotonic()
        self.save_seconds = self.last_save - now

    def _load(self) -> None:
        """Load the states that earlier processes have saved, whatever their number was."""
        for path in _state_paths(self.path):
            if not path.exists():
                continue
            try:
                state = load_state(path)
            except CheckpointError as error:
                logger.warning("%s; what it held is measured again", error)
                continue
            if state.get("size") != self.size:
                raise CheckpointError(f"{path} is the state of another version: delete it to measure anew")
            self.results |= {number: _PortionResult(**fields) for number, fields in state["found"].items()}
            self.seconds_before = max(self.seconds_before, state["seconds"])
            for number, fields in state["begun"].items():
                loaded = self.in_progress.get(number)
                portion = _PortionState(**fields)
                if loaded is None or loaded.part < portion.part:
                    portion.points = portion.points.to(self.like.device)
                    portion.fooled = portion.fooled.to(self.like.device)
                    self.in_progress[number] = portion
        for number in self.results:
            self.in_progress.pop(number, None)


def forget(path: Path) -> None:
    """Remove the saved states of an attack, and partly written ones. Call this when its result is written."""
    for state in _state_paths(path):
        files.remove(state)


def _state_paths(path: Path | None) -> list[Path]:
    """The files of all processes' states: the first process's, then those of the other ranks on disk."""
    if path is None:
        return []
    others = [other for other in path.parent.glob(f"{path.name}.*") if other.suffix[1:].isdigit()]
    return [path, *sorted(others)]


def parts(attack: Attack | None, classes: int) -> list[Stepwise]:
    """The stepwise attacks that an attack consists of; none if it is not stepwise."""
    if isinstance(attack, Stepwise):
        return [attack]
    ensemble: Callable[[int], list[Stepwise]] = getattr(attack, "parts", lambda classes: [])
    return ensemble(classes)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of the CPU and of the device, and restore their states at the end."""
    accelerators = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=accelerators, device_type=kind):
        seed_generators(seed, device)
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the random numbers of the CPU and of one device; `torch.manual_seed` would seed all devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)
