"""The verdict on each number and order of a claim."""

from collections.abc import Iterator
from dataclasses import dataclass

from harp.experiments.reproduction import verdict
from harp.experiments.reproduction.claim import Cell, Claim, Order
from harp.experiments.reproduction.computed import Value, compute
from harp.experiments.reproduction.evidence import Evidence
from harp.experiments.reproduction.verdict import State, Verdict


@dataclass(frozen=True)
class Judged:
    """One line of a claim's verdict: what is judged, what was published, what we found."""

    what: str
    published: str
    ours: str
    verdict: Verdict


def values(claim: Claim, evidence: Evidence | None) -> Iterator[tuple[Cell, Judged]]:
    """The published numbers beside ours; only the full experiment can reproduce a number."""
    for cell, expected in claim.cells.items():
        measured = evidence.measured(cell) if evidence is not None else None
        found = verdict.of_value(expected, claim.tolerance, measured)
        yield cell, Judged(cell_text(cell), f"{expected:g}", str(measured or "–"), found)


def orders(variant_orders: tuple[Order, ...], evidence: Evidence | None) -> list[Judged]:
    """The claimed orders, one for each pair of methods and share."""
    return [
        _order(order, other, keep, evidence) for order in variant_orders for keep in order.keep for other in order.than
    ]


def computed(claim: Claim) -> list[Judged]:
    """The quantities that need no data."""
    judged = []
    for quantity in claim.computed:
        found, expected = compute(quantity.what, quantity.arguments), quantity.expected
        ours, theirs = _items(found), _items(expected)
        agree = len(ours) == len(theirs) and all(
            _close(one, other, quantity.tolerance) for one, other in zip(ours, theirs, strict=True)
        )
        state = State.REPRODUCED if agree else State.DIFFERS
        arguments = ", ".join(f"{key} {value}" for key, value in quantity.arguments.items() if not _long(value))
        text = f"{quantity.what.replace('_', ' ')}{', ' * bool(arguments)}{arguments}"
        judged.append(Judged(text, _short(expected), _short(found), Verdict(state)))
    return judged


def overall(claim: Claim, evidence: Evidence | None, *, small: bool) -> Verdict:
    """One verdict for the claim: of its small variant only the orders count."""
    if small:
        if claim.small is None:
            return Verdict(State.NO_VARIANT)
        lines = orders(claim.small.orders, evidence)
        found = verdict.overall(line.verdict for line in lines)
        if found.state is State.HOLDS:
            return Verdict(State.HOLDS, f"at small scale, {found.detail}")
        return found
    numbers = [line.verdict for _, line in values(claim, evidence)]
    lines = [*orders(claim.orders, evidence), *computed(claim)]
    return verdict.overall([*numbers, *(line.verdict for line in lines)])


def cell_text(cell: Cell) -> str:
    """A cell in words."""
    share = "" if cell.keep is None else f" at {100 * cell.keep:.6g} %"
    return f"{cell.experiment}: {cell.method}{share}, {cell.measure}"


def _order(order: Order, other: str, keep: float, evidence: Evidence | None) -> Judged:
    ours, theirs = (
        dict(evidence.by_seed(Cell(order.experiment, order.measure, method, keep))) if evidence else {}
        for method in (order.better, other)
    )
    seeds = sorted(ours.keys() & theirs.keys())
    found = verdict.of_order([ours[seed].value for seed in seeds], [theirs[seed].value for seed in seeds], order.by)
    margin = "" if order.by == 0 else f" by {order.by:g}" if order.by > 0 else f", or at most {-order.by:g} behind"
    text = f"{order.experiment}: {order.better} ahead of {other}{margin} at {100 * keep:.6g} %, {order.measure}"
    return Judged(text, "ahead" if order.by >= 0 else "level", found.detail or "–", found)


def _items(value: Value) -> list[float | str]:
    return [*value] if isinstance(value, list) else [value]


def _close(ours: float | str, theirs: float | str, tolerance: float) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        return ours == theirs
    return abs(ours - theirs) <= tolerance


def _long(value: object) -> bool:
    return isinstance(value, (list, dict))


def _short(value: object) -> str:
    if not isinstance(value, list):
        return f"{value:,.10g}" if isinstance(value, float) else str(value)
    texts = [f"{item:g}" if isinstance(item, float) else str(item) for item in value]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "…", *texts[-3:]])
