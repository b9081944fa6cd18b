"""Attacks in steps, and a batch that is always full.

Most of what an attack costs is spent on the few images that hold out. An attack here is a step that treats every image
by itself: what it knows of an image are the rows of some tensors, its *state*. So images are free to come and go: one
that is fooled leaves at once, the next takes its place, and the network is asked about full batches until the end. An
image's position in the batch, and when it came, are of no meaning to it.

The random numbers of a step follow from the seed, the attack and the number of the step. With the state of the batch
that is all the future depends on: work that was killed goes on from its last state and ends with the same bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harp.attacks.fast_forward import frozen
from harp.attacks.threat import images_in_box, logits
from harp.models.modes import Logits
from harp.system.seeds import derive

State = dict[str, Tensor]


class Stepwise(ABC):
    """An attack whose steps treat every image by itself. `begin` and `advance` are called without gradients on."""

    code: ClassVar[str]
    epsilon: float
    norm: str
    steps: int
    restarts: int = 1
    fast: bool

    @property
    def name(self) -> str:
        """The attack in short, as `harp.attacks.named` reads it."""
        return f"{self.code}-{self.steps}" + (f"x{self.restarts}" if self.restarts > 1 else "")

    @abstractmethod
    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """What is known of images before the first step: tensors with a row an image.

        `clean` are their logits. `points`, the best point found so far, must be among the tensors.
        """

    @abstractmethod
    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Take a step with all images, changing `state` in place: which are fooled now, and which are at their end.

        Of an image that is fooled, `points` holds an image in the ball that the network gets wrong.
        """

    @abstractmethod
    def longest(self, classes: int) -> int:
        """How many steps an image takes that is never fooled."""

    def words(self, classes: int) -> str:
        """What runs for so many classes, in a few words: a loss, a number of targets."""
        return ""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The best points found in the balls around `x`; the seed is drawn from torch's generator."""
        with torch.inference_mode(False), torch.no_grad():
            x, y = images_in_box(x, y), y.clone()
            seed = int(torch.randint(2**62, (1,)))
            if self.epsilon == 0 or len(x) == 0:
                return x
            with frozen(model, x, fast=self.fast) as net:
                packing = Packing(self, net, x, y, batch=len(x), seed=seed)
                packing.run()
        return packing.points


class Packing:
    """An attack on images that the network gets right, through a batch that is refilled.

    `points` holds an image in each ball, and `fooled` says where it is misclassified; images that are wrong from the
    start are fooled by themselves. All images are on the device of the network.
    """

    def __init__(self, attack: Stepwise, net: Logits, x: Tensor, y: Tensor, *, batch: int, seed: int) -> None:
        self.attack, self.net, self.x, self.y, self.batch, self.seed = attack, net, x, y, batch, seed
        self.points = x.clone()
        starts = range(0, max(1, len(x)), batch)  # of no images too there are logits
        self.clean = torch.cat([logits(net, x[start : start + batch]) for start in starts])
        self.fooled = wrong(self.clean, y)
        self.queue = (~self.fooled).nonzero().flatten()
        self.taken = self.ticks = 0
        self.slots = self.queue[:0]  # the images in the batch
        self.joined = self.queue[:0]  # and the tick they came at
        self.rows: State = {}
        self._batch: tuple[Tensor, Tensor] | None = None  # images and labels of the slots, until these change

    @property
    def done(self) -> int:
        """How many images the attack is through with."""
        return len(self.x) - len(self.queue) + self.taken - len(self.slots)

    def progress(self) -> float:
        """How many images are done, counting those in the batch by the steps they took."""
        longest = max(1, self.attack.longest(self.clean.shape[1]))
        return self.done + float((self.ticks - self.joined).sum()) / longest

    @torch.no_grad()
    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Go on until every image is fooled or at its end; `after_step` may save `state()`, or stop by raising."""
        while self.taken < len(self.queue) or len(self.slots):
            self._refill()
            x, y = self._batch = self._batch or (self.x[self.slots], self.y[self.slots])
            fooled, ended = self.attack.advance(self.net, x, y, self.rows, self._generator("step"))
            self.ticks += 1
            leaving = fooled | ended
            if bool(leaving.any()):
                self.points[self.slots[leaving]] = self.rows["points"][leaving]
                self.fooled[self.slots[fooled]] = True
                self._keep(~leaving)
            after_step()

    def state(self) -> dict[str, Any]:
        """All that the future depends on, beside what the constructor was given."""
        names = ("points", "fooled", "taken", "ticks", "slots", "joined", "rows")
        return {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, Any]) -> None:
        """Take a state back."""
        for name, value in state.items():
            setattr(self, name, _on(value, self.x.device))
        self._batch = None

    def _refill(self) -> None:
        # Few newcomers are as dear as many: wait until a quarter of the places is free, unless all are.
        free = self.batch - len(self.slots)
        if self.taken == len(self.queue) or (len(self.slots) and 4 * free < self.batch):
            return
        fresh = self.queue[self.taken : self.taken + free]
        self.taken += len(fresh)
        began = self.attack.begin(self.net, self.x[fresh], self.y[fresh], self.clean[fresh], self._generator("begin"))
        self.slots, self._batch = torch.cat([self.slots, fresh]), None
        self.joined = torch.cat([self.joined, torch.full_like(fresh, self.ticks)])
        self.rows = {key: torch.cat([self.rows[key], rows]) for key, rows in began.items()} if self.rows else began

    def _keep(self, staying: Tensor) -> None:
        self.slots, self.joined = self.slots[staying], self.joined[staying]
        self._batch = None
        self.rows = {key: rows[staying] for key, rows in self.rows.items()}

    def _generator(self, purpose: str) -> torch.Generator:
        seed = derive(self.seed, self.attack.name, purpose, self.ticks)
        return torch.Generator(self.x.device).manual_seed(seed)


def wrong(answer: Tensor, y: Tensor) -> Tensor:
    """Which answers are wrong. One that is not finite is wrong, whatever its argmax."""
    return (answer.argmax(1) != y) | ~answer.isfinite().all(1)


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
