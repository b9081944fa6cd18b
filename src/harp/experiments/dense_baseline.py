"""The baseline `dense-small`: a narrow dense network of the same size as a pruned one."""

from typing import Any

from harp.data import registry
from harp.errors import BudgetError, ModelError, RecipeError
from harp.experiments import build
from harp.experiments.recipe import Model, Recipe

STEPS = 4096  # widths are multiples of 1 / STEPS, which is finer than a channel of our networks


def width(made: Recipe, source: registry.DataSet, total: int) -> float:
    """The largest width at which the recipe's model costs at most `total`."""
    try:
        least = size(made, source, 1 / STEPS)
    except ModelError as error:
        raise RecipeError(f"dense-small needs a model whose `width` may be any number: {error}") from error
    if least > total:
        raise BudgetError(f"dense-small: {made.model.name} costs {least:,} at its narrowest, above {total:,}")
    low, high = 1, 2
    while size(made, source, high / STEPS) <= total:
        low, high = high, 2 * high
        if high > 2**30:
            raise RecipeError(f"dense-small: {made.model.name} does not grow with its width")
    while high - low > 1:  # costs grow with the width: bisection
        middle = (low + high) // 2
        low, high = (middle, high) if size(made, source, middle / STEPS) <= total else (low, middle)
    return low / STEPS


def size(made: Recipe, source: registry.DataSet, at: float) -> int:
    """The size of the recipe's model at a width, in what the budget counts."""
    model = build.build(Model.model_validate(part(made, at)), source, None)
    return build.size_of(made.units, model, source)


def part(made: Recipe, at: float) -> dict[str, Any]:
    """The recipe's model at a width, without the weights of the wide one."""
    return {**made.model.model_dump(exclude={"weights"}, exclude_defaults=True), "width": at}
