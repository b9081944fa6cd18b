"""The square attack: random search that asks for logits only.

Andriushchenko, Croce, Flammarion & Hein, "Square Attack: a query-efficient black-box adversarial attack via random
search", ECCV 2020. A query changes the best point so far in one random square, and is kept if the margin

    z_y − max_{j≠y} z_j

gets smaller. The side of the squares is √(p h w), where p starts at `share` and is halved along a schedule. In the
maximum norm (algorithm 2) the square becomes +ε or −ε, one sign a channel; the start are stripes of one column. In
the Euclidean norm (algorithm 3) the perturbation of one square is taken away, and its length given to another square
in the form η of two pyramids of opposite signs, added to what is there; the start are 5 × 5 squares of that form.

A query that changes nothing, since the square has these signs already, need not be asked: its answer is known. With
one channel that is up to half of the queries. And of a query in the maximum norm only what the square changes need be
computed, where that is faster: see `harp.attacks.incremental`.

Departures from the authors' code in the AutoAttack package:

* Squares are drawn for each image and not for the whole batch.
* A square lies anywhere in the image, as in the paper; the code never reaches the last row and column.
* An image is fooled when its class is another one; the code stops at a margin of exactly zero, too.
* Images of fewer than five rows or columns, or not square, are no error.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from harp.attacks import incremental
from harp.attacks.batched import State, Stepwise, wrong
from harp.attacks.incremental import Windows
from harp.attacks.threat import Ball, check_number, logits, per_image
from harp.errors import DataError
from harp.models.modes import Logits

_HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # of 10 000 queries
_TILES = 5  # squares along each side at the start, in the Euclidean norm
_TINY = 1e-12
_MAP = "map "  # of the state: the names of feature maps


class _Place(NamedTuple):
    """Where squares are: the pixels of both axes as seen from their corners. And all that was drawn for them."""

    draws: Tensor
    kind: Tensor
    side: Tensor
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Square(Stepwise):
    """The square attack on the margin, of `steps` queries and one for the start.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        steps: queries of the network.
        restarts: runs from other random points.
        share: how much of the image the first squares cover.
        rescaled: fit the schedule, which is made for 10 000 queries, to `steps`.
        fast: run the network folded and, where it is sparse, on the sparse engine; the attack is the same up to
            rounding.

    Example:
        attack = harp.Square(epsilon=8 / 255, steps=20)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    epsilon: float = 8 / 255
    norm: str = "linf"
    steps: int = 5000
    restarts: int = 1
    share: float = 0.8  # of the image that the first squares cover
    rescaled: bool = True  # whether the schedule, made for 10 000 queries, is fitted to `steps`
    fast: bool = True

    code: ClassVar[str] = "square"

    def __post_init__(self) -> None:
        Ball(self.epsilon, self.norm)
        check_number("steps", self.steps, whole=True, least=1)
        check_number("restarts", self.restarts, whole=True, least=1)
        check_number("share", self.share)

    def words(self, classes: int) -> str:
        """The loss and the cost."""
        return f"margin, {self.restarts * self.steps} queries without gradients"

    def longest(self, classes: int) -> int:
        """How many steps an image takes that is never fooled: one for each start and one for each query."""
        return self.restarts * (self.steps + 1)

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """The start of every image."""
        if x.ndim != 4:
            raise DataError(f"{self.code} needs images of shape (channels, height, width), not {tuple(x.shape[1:])}")
        number = torch.zeros(len(x), dtype=torch.long, device=x.device)
        margin = torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
        return {"points": self._start(x, generator), "margin": margin, "step": number, "run": number.clone()}

    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Ask about one more square of each image."""
        step, points = state["step"], state["points"]
        first = step == 0  # the start itself is asked about
        place = self._place(x, step, generator)
        proposal = self._proposal(x, points, step, place)
        asked = (first | (proposal != points).flatten(1).any(1)).nonzero().flatten()
        margin, fooled = state["margin"], torch.zeros_like(first)
        largest = max(1, int(place.side.max()))
        local = incremental.of(net, x, largest) if self.norm == "linf" else None
        maps = _maps(local, state)
        if len(asked):
            some = proposal if len(asked) == len(y) else proposal[asked]
            if local is None:
                answer, news = logits(net, some), None
            else:
                corner = -place.rows[asked, 0], -place.columns[asked, 0]
                answer, news = local.ask(maps, asked, some, corner, largest)
            found, lost = _margin(answer, y[asked])
            better = ((found < margin[asked]) | lost).nonzero().flatten()
            fooled[asked] = lost
            if len(better):
                kept = asked[better]
                points[kept], margin[kept] = proposal[kept], found[better].to(margin.dtype)
                if local is not None and news is not None:
                    local.take(maps, asked, news, better)
        through = step == self.steps
        state["step"] = step + 1
        if not through.any():
            return fooled, through
        state["run"] += through
        ended = state["run"] == self.restarts
        again = (through & ~ended & ~fooled).nonzero().flatten()
        if len(again):
            points[again] = self._start(x[again], generator)
            _maps(None, state)  # they are of other points now
            margin[again], state["step"][again] = math.inf, 0
        return fooled, ended

    def _start(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Stripes, or squares of the form that later queries have."""
        count, channels, height, width = x.shape
        if self.norm == "linf":
            stripes = torch.rand(count, channels, 1, width, generator=generator, device=x.device, dtype=x.dtype) < 0.5
            return torch.where(stripes, x + self.epsilon, x - self.epsilon).clamp_(0, 1)
        side = max(min(height, width) // _TILES, 1)
        down, across = min(_TILES, height // side), min(_TILES, width // side)
        form = two_pyramids(side).to(x)
        draws = torch.rand(2, down, across, count, channels, generator=generator, device=x.device, dtype=x.dtype)
        offset = torch.zeros_like(x)
        for row, column in product(range(down), range(across)):
            top, left = (height - down * side) // 2 + row * side, (width - across * side) // 2 + column * side
            sign = torch.where(draws[0, row, column] < 0.5, 1.0, -1.0)[..., None, None]
            turned = draws[1, row, column, :, :1, None, None] < 0.5
            offset[:, :, top : top + side, left : left + side] = torch.where(turned, form.T, form) * sign
        return self._at_distance(x, offset)

    def _place(self, x: Tensor, step: Tensor, generator: torch.Generator) -> _Place:
        """Draw a square for every image."""
        count, channels, height, width = x.shape
        table, kinds = schedule(self.steps, self.share, self.rescaled, self.norm, height, width)
        kind = kinds.to(x.device)[step]
        side = table.to(x.device)[kind][:, None]
        draws = torch.rand(5 + channels, count, 1, generator=generator, device=x.device, dtype=x.dtype)
        return _Place(draws, kind, side, along(height, side, draws[0]), along(width, side, draws[1]))

    def _proposal(self, x: Tensor, points: Tensor, step: Tensor, place: _Place) -> Tensor:
        """The points with one square changed; those that are at their start as they are."""
        height, width = x.shape[2:]
        draws, kind, side, rows, columns = place
        signs = (draws[5:] < 0.5).transpose(0, 1)[..., None]
        inside = within(rows, columns, side)
        if self.norm == "linf":
            low, high = (x - self.epsilon).clamp_(0, 1), (x + self.epsilon).clamp_(0, 1)
            return torch.where(inside, torch.where(signs, high, low), points)
        cleared = within(along(height, side, draws[2]), along(width, side, draws[3]), side)
        forms = _forms(self.steps, self.share, self.rescaled, height, width).to(x)
        turned = kind + len(forms) // 2 * (draws[4, :, 0] < 0.5)
        last = forms.shape[1] - 1  # a row and a column of zeros, for all that is outside
        rows, columns = (torch.where((at >= 0) & (at < side), at, last) for at in (rows, columns))
        form = forms[turned[:, None, None], rows[:, :, None], columns[:, None, :]][:, None]
        changed = moved(points - x, form * torch.where(signs, 1.0, -1.0), inside, cleared, self.epsilon)
        return torch.where(per_image(step > 0, x), self._at_distance(x, changed), points)

    def _at_distance(self, x: Tensor, offset: Tensor) -> Tensor:
        """Points at the distance epsilon along an offset, clipped to the box."""
        length = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        return (x + offset * per_image(self.epsilon / (length + _TINY), x)).clamp_(0, 1)


def _maps(local: Windows | None, state: State) -> list[Tensor]:
    """The feature maps of the points, which are computed where there are none; without `local` they are dropped.

    They are rows of the state as all else: the last bits of maps that are computed anew may be others. Newcomers have
    none, so that those of all are computed again with them.
    """
    keys = sorted((key for key in state if key.startswith(_MAP)), key=lambda key: int(key.removeprefix(_MAP)))
    if local is None:
        for key in keys:
            del state[key]
        return []
    if not keys:
        state.update({f"{_MAP}{at}": rows for at, rows in enumerate(local.fill(state["points"]))})
        return _maps(local, state)
    return [state[key] for key in keys]


def _margin(answer: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """How far the true class is above the others, and which answers are wrong."""
    true = answer.gather(1, y[:, None]).squeeze(1)
    other = answer.scatter(1, y[:, None], -math.inf).amax(1)
    return true - other, wrong(answer, y)


def moved(offset: Tensor, form: Tensor, inside: Tensor, cleared: Tensor, epsilon: float) -> Tensor:
    """The perturbation when the length in the square `cleared`, and what is left of epsilon, went to `inside`."""
    squares, here = offset.square(), inside.to(offset.dtype)
    spare = (epsilon**2 - squares.sum((1, 2, 3), keepdim=True)).clamp_min(0) / offset.shape[1]
    length = (spare + squares.masked_fill(~(inside | cleared), 0).sum((2, 3), keepdim=True)).sqrt()
    form = form + offset * here / ((squares * here).sum((2, 3), keepdim=True).sqrt() + _TINY)
    form = form * (length / (form.square().sum((2, 3), keepdim=True).sqrt() + _TINY))
    return torch.where(inside, form, offset.masked_fill(cleared, 0))


def along(length: int, side: Tensor, draw: Tensor) -> Tensor:
    """Where the pixels of an axis are, as seen from the corner of a randomly placed square."""
    places = length - side
    corner = torch.minimum((draw * (places + 1)).long(), places)
    return torch.arange(length, device=draw.device) - corner


def within(rows: Tensor, columns: Tensor, side: Tensor) -> Tensor:
    """Which pixels are in the squares."""
    down, across = ((at >= 0) & (at < side) for at in (rows, columns))
    return down[:, None, :, None] & across[:, None, None, :]


@cache
def schedule(steps: int, share: float, rescaled: bool, norm: str, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The sides that occur, from the smallest up, and for every query which it is; 0 for the start, the zeroth."""
    found = [0]
    for query in range(steps):
        now = int(query / steps * 10_000) if rescaled else query
        p = share / 2 ** sum(now > after for after in _HALVED_AFTER)
        side = round(math.sqrt(p * height * width))
        side = max(side, 1) if norm == "linf" else max(side, 3) // 2 * 2 + 1  # odd, so that there is a middle
        found.append(min(side, height, width))
    sides = sorted(set(found))
    return torch.tensor(sides), torch.tensor([sides.index(side) for side in found])


@cache
def _forms(steps: int, share: float, rescaled: bool, height: int, width: int) -> Tensor:
    """The forms of all sides that occur, then the same turned, with zeros below and to the right."""
    sides = schedule(steps, share, rescaled, "l2", height, width)[0].tolist()
    forms = torch.zeros(len(sides), sides[-1] + 1, sides[-1] + 1)
    for form, side in zip(forms, sides, strict=True):
        form[:side, :side] = two_pyramids(side)
    return torch.cat([forms, forms.transpose(1, 2)])


def two_pyramids(side: int) -> Tensor:
    """Two pyramids of opposite signs, one above the other, of the length one."""
    form = torch.cat([pyramid(side // 2, side), -pyramid(side - side // 2, side)])
    unit: Tensor = form / (torch.linalg.vector_norm(form) + _TINY)
    return unit


def pyramid(height: int, width: int) -> Tensor:
    """Σ_k 1/(k + 1)² over the rings k around a pixel's place and beyond, of the length one."""
    rings = 1 / torch.arange(1, max(height, width) // 2 + 2).square()
    rows, columns = ((torch.arange(size) - size // 2).abs() for size in (height, width))
    pyramid = rings.flip(0).cumsum(0).flip(0)[torch.maximum(rows[:, None], columns)]
    unit: Tensor = pyramid / (torch.linalg.vector_norm(pyramid) + _TINY)
    return unit
