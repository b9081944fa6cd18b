"""Scales: where a value lies between the ends of an axis, and which round values to write along it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`; logarithmic, or with its high end first, if wanted."""

    low: float
    high: float
    log: bool = False
    reverse: bool = False

    def at(self, value: float) -> float:
        """The place of a value: 0 at the axis's beginning, 1 at its end; values beyond the ends stay at the ends."""
        low, high, value = (self._measure(number) for number in (self.low, self.high, value))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return 1.0 - share if self.reverse else share

    def _measure(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self, most: int = 6) -> list[float]:
        """Round values on the axis, in rising order."""
        if not self.log:
            return _linear(self.low, self.high, most)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            every = math.ceil((last - first + 1) / most)
            return [10.0**power for power in range(first, last + 1, every)]
        found = [
            factor * 10.0**power
            for power in range(first - 1, last + 1)
            for factor in (1, 2, 5)
            if self.low * (1 - 1e-9) <= factor * 10.0**power <= self.high * (1 + 1e-9)
        ]
        return found if len(found) >= 2 else [tick for tick in _linear(self.low, self.high, most) if tick > 0]


def _linear(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / max(1, most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((unit * factor for factor in _STEPS if unit * factor >= rough * (1 - 1e-9)), unit * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def fit(
    values: Iterable[float | None],
    *,
    log: bool = False,
    reverse: bool = False,
    include: Sequence[float] = (),
    room: float = 0.06,
    least: float = -math.inf,
    most: float = math.inf,
) -> Scale:
    """The scale that holds all finite values (the positive ones, if logarithmic), with some room at both ends.

    `least` and `most` are values that the room must not go beyond, such as 0 and 100 per cent.
    """
    known = [value for value in (*values, *include) if value is not None and math.isfinite(value)]
    known = [value for value in known if value > 0] if log else known
    if not known:
        return Scale(0.1 if log else 0.0, 1.0, log, reverse)
    low, high = min(known), max(known)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, or as good as one
        wide = 0.5 * abs(high) or 0.5
        low, high = (low / 2, high * 2) if log else (low - wide, high + wide)
    elif log:
        factor = (high / low) ** room
        low, high = low / factor, high * factor
    else:
        extra = (high - low) * room
        low, high = low - extra, high + extra
    low, high = max(low, least), min(high, most)
    if high <= low:  # all values lie on a limit or beyond it
        low, high = (high / 2, high) if log else (high - 1.0, high)
    return Scale(low, high, log, reverse)


def text(value: float) -> str:
    """A tick's value, short and exact."""
    if value != 0 and not 1e-4 <= abs(value) < 1e5:
        whole = f"{value:.3e}"
        mantissa, _, power = whole.partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        tail = f"10{_raised(int(power))}"
        return tail if mantissa == "1" else f"{mantissa}·{tail}"
    return f"{value:.6g}".replace("-", "−")


def _raised(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
