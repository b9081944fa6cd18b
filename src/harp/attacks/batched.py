"""Attacks in steps, and a batch that is always full.

Most of the cost of an attack is spent on the few images that are hard to fool. An attack here is a step that treats
every image by itself: what it knows about an image are the rows of some tensors, its *state*. So an image that is
fooled leaves the batch at once, the next image takes its place, and the network is called on full batches until the
end. The position of an image in the batch, and the time when it joined, do not matter.

The random numbers of a step depend on the seed, the attack and the number of the step only. So an attack that was
killed continues from its last saved state and ends with the same bits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harp.attacks.fast_forward import frozen
from harp.attacks.threat import check_ball, check_number, images_in_box, logits
from harp.models.modes import Logits
from harp.system.seeds import derive

State = dict[str, Tensor]


class Stepwise(ABC):
    """An attack whose steps treat every image by itself. `begin` and `advance` are called without gradients."""

    code: ClassVar[str]
    epsilon: float
    norm: str
    steps: int
    restarts: int = 1
    fast: bool

    def __post_init__(self) -> None:
        check_ball(self)
        check_number("steps", self.steps, whole=True, least=1)
        check_number("restarts", self.restarts, whole=True, least=1)

    @property
    def name(self) -> str:
        """The short name that `harp.attacks.named` reads."""
        return f"{self.code}-{self.steps}" + (f"x{self.restarts}" if self.restarts > 1 else "")

    @abstractmethod
    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """The state before the first step: tensors with one row for each image.

        `clean` are the logits of the images. One of the tensors must be `points`, the best points found so far.
        """

    @abstractmethod
    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Take a step with all images and change `state` in place: which are fooled now, and which have ended.

        For an image that is fooled, `points` holds an image in the ball that the network gets wrong.
        """

    @abstractmethod
    def longest(self, classes: int) -> int:
        """The number of steps for an image that is never fooled."""

    def words(self, classes: int) -> str:
        """A short description for a number of classes, such as the loss and the number of targets."""
        return ""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The best points found in the balls around `x`; the seed is drawn from torch's generator."""
        with torch.inference_mode(False), torch.no_grad():
            x, y = images_in_box(x, y, model), y.clone()
            seed = int(torch.randint(2**62, (1,)))
            if self.epsilon == 0 or len(x) == 0:
                return x
            with frozen(model, x, fast=self.fast) as net:
                packing = Packing(self, net, x, y, batch=len(x), seed=seed, model=model)
                packing.run()
            return packing.points


class Packing:
    """An attack on images through a batch that is refilled.

    `points` holds an image in each ball, and `fooled` says where it is misclassified; images that are misclassified
    without an attack are fooled from the start. If `net` is a folded form of `model`, which rounds differently, an
    image that only `net` gets wrong is not fooled, and its attack continues. All images are on the network's device.
    """

    def __init__(
        self, attack: Stepwise, net: Logits, x: Tensor, y: Tensor, *, batch: int, seed: int, model: Logits | None = None
    ) -> None:
        self.attack, self.net, self.x, self.y, self.batch, self.seed = attack, net, x, y, batch, seed
        self.model = net if model is None else model
        self.points = x.clone()
        starts = range(0, max(1, len(x)), batch)  # at least one call: its shape says the number of classes
        self.clean = torch.cat([logits(net, x[start : start + batch]) for start in starts])
        self.fooled = self._confirmed(wrong(self.clean, y), x, y)
        self.queue = (~self.fooled).nonzero().flatten()
        self.taken = self.ticks = 0
        self.slots = self.queue[:0]  # the images in the batch
        self.joined = self.queue[:0]  # and the ticks at which they joined
        self.rows: State = {}
        self._batch: tuple[Tensor, Tensor] | None = None  # images and labels of the slots, until these change

    def progress(self) -> float:
        """The number of finished images, and for those in the batch the share of steps they have taken."""
        finished = len(self.x) - len(self.queue) + self.taken - len(self.slots)
        return finished + float((self.ticks - self.joined).sum()) / self.attack.longest(self.clean.shape[1])

    @torch.no_grad()
    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Run until every image is fooled or has ended; `after_step` may save `state()`, or raise to stop."""
        while self.taken < len(self.queue) or len(self.slots):
            self._refill()
            x, y = self._batch = self._batch or (self.x[self.slots], self.y[self.slots])
            fooled, ended = self.attack.advance(self.net, x, y, self.rows, self._generator("step"))
            self.ticks += 1
            fooled = self._confirmed(fooled, self.rows["points"], y)
            leaving = fooled | ended
            if bool(leaving.any()):
                self.points[self.slots[leaving]] = self.rows["points"][leaving]
                self.fooled[self.slots[fooled]] = True
                self.slots, self.joined, self._batch = self.slots[~leaving], self.joined[~leaving], None
                self.rows = {key: rows[~leaving] for key, rows in self.rows.items()}
            after_step()

    def state(self) -> dict[str, Any]:
        """All that the rest of the attack depends on, except the arguments of the constructor."""
        names = ("points", "fooled", "taken", "ticks", "slots", "joined", "rows")
        return {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        for name, value in state.items():
            setattr(self, name, value.to(self.x.device) if isinstance(value, Tensor) else value)
        self.rows = {key: rows.to(self.x.device) for key, rows in self.rows.items()}
        self._batch = None

    def _refill(self) -> None:
        # Adding one image costs as much as adding many: wait until a quarter of the batch is free.
        free = self.batch - len(self.slots)
        if self.taken == len(self.queue) or (len(self.slots) and 4 * free < self.batch):
            return
        fresh = self.queue[self.taken : self.taken + free]
        self.taken += len(fresh)
        began = self.attack.begin(self.net, self.x[fresh], self.y[fresh], self.clean[fresh], self._generator("begin"))
        self.slots, self._batch = torch.cat([self.slots, fresh]), None
        self.joined = torch.cat([self.joined, torch.full_like(fresh, self.ticks)])
        self.rows = {key: torch.cat([self.rows[key], rows]) for key, rows in began.items()} if self.rows else began

    def _confirmed(self, fooled: Tensor, points: Tensor, y: Tensor) -> Tensor:
        """The images among `fooled` that the plain model gets wrong, too."""
        if self.model is self.net or not fooled.any():
            return fooled
        rows = fooled.nonzero().flatten()
        return fooled.index_put((rows,), wrong(logits(self.model, points[rows]), y[rows]))

    def _generator(self, purpose: str) -> torch.Generator:
        seed = derive(self.seed, self.attack.name, purpose, self.ticks)
        return torch.Generator(self.x.device).manual_seed(seed)


def wrong(answer: Tensor, y: Tensor) -> Tensor:
    """Which images are misclassified. Logits that are not finite are wrong, whatever their argmax."""
    return (answer.argmax(1) != y) | ~answer.isfinite().all(1)


def likeliest(clean: Tensor, y: Tensor, count: int) -> Tensor:
    """The classes with the largest logits except the true one, the largest first."""
    order = clean.scatter(1, y[:, None], math.inf).argsort(dim=1, descending=True, stable=True)
    return order[:, 1 : 1 + count]


def next_runs(state: State, over: Tensor, runs: int, fooled: Tensor) -> tuple[Tensor, Tensor]:
    """Count the runs that are over: which images have ended, and the rows of those that start another run."""
    state["run"] = state["run"] + over.long()
    ended = state["run"] == runs
    return ended, (over & ~ended & ~fooled).nonzero().flatten()
