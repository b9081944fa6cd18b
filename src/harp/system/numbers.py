"""Numbers as people write them, such as `8/255` and `1%`, and shares, which are easily mistaken for per cent."""

import numbers
from decimal import Decimal
from typing import Any

from harp.errors import BudgetError, RecipeError


def number(value: Any) -> Any:
    """Read `8/255`, `1e-4` and `1%` as numbers; other values are left as they are."""
    if not isinstance(value, (str, bool)):
        return value
    text = str(value).strip()
    above, slash, below = (text[:-1], "%", "100") if text.endswith("%") else text.partition("/")
    try:
        return float(Decimal(above) / Decimal(below if slash else 1))  # decimal: 0.7% is exactly 0.007
    except ArithmeticError as error:
        raise RecipeError(f"{value!r} is no number: write it like 0.01, 1%, 8/255 or 1e-4") from error


def share(value: Any) -> float:
    """The share of the whole that is kept, from a number or from text such as `1%`.

    A bare 1 is refused, as it may mean 1 % or all: 1.0 and `100%` mean all.
    """
    advice = 'give a share above 0 and at most 1 (= 100%), like 0.01 or "1%"'
    try:
        kept = number(value)
    except RecipeError as error:
        raise BudgetError(f"keep {value!r} is no number: {advice}") from error
    if isinstance(kept, bool) or not isinstance(kept, numbers.Real):
        raise BudgetError(f"keep {brief(value)}: {advice}")
    part = float(kept)
    if part == 1 and (isinstance(value, numbers.Integral) or (isinstance(value, str) and value.strip() == "1")):
        raise BudgetError('keep 1 means 100 %: did you mean "1%"? Write "100%" to keep all')
    if 1 < part <= 100 and not (isinstance(value, str) and "%" in value):
        raise BudgetError(f'keep {part:.6g} is more than 100 %: did you mean "{part:.6g}%"?')
    if not 0 < part <= 1:
        raise BudgetError(f"keep {repr(value) if isinstance(value, str) else format(part, '.6g')}: {advice}")
    return part


def per_cent(part: float) -> str:
    """A share as per cent, in a few digits."""
    return f"{100 * part:.3g} %"


def brief(value: Any) -> str:
    """A value in one short line, for messages."""
    name = getattr(value, "__name__", None)
    if isinstance(name, str):  # of a class, a function or a module
        return f"{name} (a class)" if isinstance(value, type) else name
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"{type(value).__name__}(...)"
