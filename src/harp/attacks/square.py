"""The square attack: random search that asks for logits only.

Andriushchenko, Croce, Flammarion & Hein, "Square Attack: a query-efficient black-box adversarial attack via random
search", ECCV 2020. A query changes the best point so far in one random square, and is kept if the margin

    z_y − max_{j≠y} z_j

gets smaller. The side of the squares is √(p h w), where p starts at `share` and is halved along a schedule. In the
maximum norm (algorithm 2) the square becomes +ε or −ε, with one sign for each channel; the start are stripes of one
column. In the Euclidean norm (algorithm 3) the perturbation in one square is removed, and its length is given to
another square: two pyramids of opposite signs are added there. The start are 5 × 5 squares of that form.

A query that changes nothing is not sent to the network, as its answer is known: the square has these signs already.
With one channel these are up to half of the queries.

Departures from the authors' code in the AutoAttack package:

* Squares are drawn for each image and not once for the batch.
* A square may be anywhere in the image, as in the paper; the code never reaches the last row and column.
* An image is fooled when its class is another one; the code also stops at a margin of exactly zero.
* Images may have fewer than five rows or columns, and need not be square.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from harp.attacks.batched import State, Stepwise, next_runs, wrong
from harp.attacks.threat import check_number, logits, margin, per_image
from harp.errors import DataError
from harp.models.modes import Logits

_HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # of 10 000 queries
_TILES = 5  # squares along each side at the start, in the Euclidean norm
_TINY = 1e-12


@dataclass(frozen=True)
class Square(Stepwise):
    """The square attack on the margin, with `steps` queries after one for the start.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        steps: the number of queries.
        restarts: runs from other random points.
        share: how much of the image the first squares cover.
        rescaled: fit the schedule, which is made for 10 000 queries, to `steps`.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.Square(epsilon=8 / 255, steps=20)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    epsilon: float = 8 / 255
    norm: str = "linf"
    steps: int = 5000
    restarts: int = 1
    share: float = 0.8
    rescaled: bool = True
    fast: bool = True

    code: ClassVar[str] = "square"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("share", self.share)

    def words(self, classes: int) -> str:
        """The loss and the number of queries."""
        return f"margin, {self.restarts * self.steps} queries without gradients"

    def longest(self, classes: int) -> int:
        """The number of steps for an image that is never fooled: one for each start and one for each query."""
        return self.restarts * (self.steps + 1)

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """The start of the first run."""
        if x.ndim != 4:
            raise DataError(f"{self.code} needs images of shape (channels, height, width), not {tuple(x.shape[1:])}")
        number = torch.zeros(len(x), dtype=torch.long, device=x.device)
        margin = torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
        return {"points": self._start(x, generator), "margin": margin, "step": number, "run": number.clone()}

    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Query the network about one more square of each image."""
        step, points, best = state["step"], state["points"], state["margin"]
        proposal = self._proposal(x, points, step, generator)
        queried = ((step == 0) | (proposal != points).flatten(1).any(1)).nonzero().flatten()
        fooled = torch.zeros_like(step, dtype=torch.bool)
        if len(queried):
            answer = logits(net, proposal[queried])
            margins, misclassified = margin(answer, y[queried]).to(best.dtype), wrong(answer, y[queried])
            better = (margins < best[queried]) | misclassified
            fooled[queried] = misclassified
            kept = queried[better]
            points[kept], best[kept] = proposal[kept], margins[better]
        state["step"] = step + 1
        ended, again = next_runs(state, step == self.steps, self.restarts, fooled)
        if len(again):
            points[again] = self._start(x[again], generator)
            best[again], state["step"][again] = math.inf, 0
        return fooled, ended

    def _start(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Stripes, or 5 × 5 squares with the pyramids of later queries."""
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

    def _proposal(self, x: Tensor, points: Tensor, step: Tensor, generator: torch.Generator) -> Tensor:
        """The points with one random square changed; at step 0 the points themselves."""
        count, channels, height, width = x.shape
        tables = schedule(self.steps, self.share, self.rescaled, self.norm, height, width)
        sides, kinds = (table.to(x.device) for table in tables)
        kind = kinds[step]
        side = sides[kind][:, None]
        draws = torch.rand(5 + channels, count, 1, generator=generator, device=x.device, dtype=x.dtype)
        rows, columns = along(height, side, draws[0]), along(width, side, draws[1])
        signs = (draws[5:] < 0.5).transpose(0, 1)[..., None]
        inside = within(rows, columns, side)
        if self.norm == "linf":
            low, high = (x - self.epsilon).clamp_(0, 1), (x + self.epsilon).clamp_(0, 1)
            return torch.where(inside, torch.where(signs, high, low), points)
        cleared = within(along(height, side, draws[2]), along(width, side, draws[3]), side)
        forms = _forms(tuple(sides.tolist())).to(x)
        turned = kind + len(forms) // 2 * (draws[4, :, 0] < 0.5)
        last = forms.shape[1] - 1  # a row and a column of zeros, for all pixels outside of the square
        rows, columns = (torch.where((at >= 0) & (at < side), at, last) for at in (rows, columns))
        form = forms[turned[:, None, None], rows[:, :, None], columns[:, None, :]][:, None]
        changed = moved(points - x, form * torch.where(signs, 1.0, -1.0), inside, cleared, self.epsilon)
        return torch.where(per_image(step > 0, x), self._at_distance(x, changed), points)

    def _at_distance(self, x: Tensor, offset: Tensor) -> Tensor:
        """Points at distance epsilon along an offset, clipped to the box."""
        length = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        return (x + offset * per_image(self.epsilon / (length + _TINY), x)).clamp_(0, 1)


def moved(offset: Tensor, form: Tensor, inside: Tensor, cleared: Tensor, epsilon: float) -> Tensor:
    """The perturbation after the length in `cleared`, and the unused rest of epsilon, went to the square `inside`."""
    squares, here = offset.square(), inside.to(offset.dtype)
    spare = (epsilon**2 - squares.sum((1, 2, 3), keepdim=True)).clamp_min(0) / offset.shape[1]
    length = (spare + squares.masked_fill(~(inside | cleared), 0).sum((2, 3), keepdim=True)).sqrt()
    form = form + offset * here / ((squares * here).sum((2, 3), keepdim=True).sqrt() + _TINY)
    form = form * (length / (form.square().sum((2, 3), keepdim=True).sqrt() + _TINY))
    return torch.where(inside, form, offset.masked_fill(cleared, 0))


def along(length: int, side: Tensor, draw: Tensor) -> Tensor:
    """The positions of the pixels along an axis, relative to the corner of a randomly placed square."""
    places = length - side
    corner = torch.minimum((draw * (places + 1)).long(), places)
    return torch.arange(length, device=draw.device) - corner


def within(rows: Tensor, columns: Tensor, side: Tensor) -> Tensor:
    """Which pixels are in the squares."""
    down, across = ((at >= 0) & (at < side) for at in (rows, columns))
    return down[:, None, :, None] & across[:, None, None, :]


@cache
def schedule(steps: int, share: float, rescaled: bool, norm: str, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The sorted sides that occur, and for every step the index of its side; step 0, the start, has side 0."""
    side_of_step = [0]
    for query in range(steps):
        now = int(query / steps * 10_000) if rescaled else query
        p = share / 2 ** sum(now > after for after in _HALVED_AFTER)
        side = round(math.sqrt(p * height * width))
        side = max(side, 1) if norm == "linf" else max(side, 3) // 2 * 2 + 1  # odd, so that there is a middle
        side_of_step.append(min(side, height, width))
    sides = sorted(set(side_of_step))
    return torch.tensor(sides), torch.tensor([sides.index(side) for side in side_of_step])


@cache
def _forms(sides: tuple[int, ...]) -> Tensor:
    """The two pyramids for each side, then the same transposed, with zeros below and to the right."""
    forms = torch.zeros(len(sides), sides[-1] + 1, sides[-1] + 1)
    for form, side in zip(forms, sides, strict=True):
        form[:side, :side] = two_pyramids(side)
    return torch.cat([forms, forms.transpose(1, 2)])


def two_pyramids(side: int) -> Tensor:
    """Two pyramids of opposite signs, one above the other, with norm 1."""
    form = torch.cat([pyramid(side // 2, side), -pyramid(side - side // 2, side)])
    unit: Tensor = form / (torch.linalg.vector_norm(form) + _TINY)
    return unit


def pyramid(height: int, width: int) -> Tensor:
    """Σ 1/(k + 1)² over k from a pixel's ring around the centre to the outermost ring, scaled to norm 1."""
    rings = 1 / torch.arange(1, max(height, width) // 2 + 2).square()
    rows, columns = ((torch.arange(size) - size // 2).abs() for size in (height, width))
    pyramid = rings.flip(0).cumsum(0).flip(0)[torch.maximum(rows[:, None], columns)]
    unit: Tensor = pyramid / (torch.linalg.vector_norm(pyramid) + _TINY)
    return unit
