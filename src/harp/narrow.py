"""A small dense network of equal size: the rival that no pruning method may lose to."""

from typing import Any

from harp import assess, data
from harp.errors import BudgetError, ModelError, RecipeError
from harp.recipe import Model, Recipe
from harp.units import Weights

STEPS = 4096  # widths are multiples of 1 / STEPS: finer than a channel of the networks here


def width(made: Recipe, source: data.DataSet, total: int) -> float:
    """The width at which the recipe's model has as many prunable weights as possible, but at most `total`."""
    try:
        least = weights(made, source, 1 / STEPS)
    except ModelError as error:
        raise RecipeError(f"dense-small needs a model whose `width` may be any number: {error}") from error
    if least > total:
        raise BudgetError(f"dense-small: {made.model.name} has {least:,} weights at its narrowest, above {total:,}")
    low, high = 1, 2
    while weights(made, source, high / STEPS) <= total:
        low, high = high, 2 * high
        if high > 2**30:
            raise RecipeError(f"dense-small: {made.model.name} does not grow with its width")
    while high - low > 1:  # weights grow with the width, so halving finds the last one that fits
        middle = (low + high) // 2
        low, high = (middle, high) if weights(made, source, middle / STEPS) <= total else (low, middle)
    return low / STEPS


def weights(made: Recipe, source: data.DataSet, at: float) -> int:
    """How many prunable weights the recipe's model has at a width."""
    model = assess.build(Model.model_validate(part(made, at)), source, None)
    return Weights(model, **made.units.options()).size


def part(made: Recipe, at: float) -> dict[str, Any]:
    """The recipe's model at a width; weights of the wide one are of no use to it."""
    return {**made.model.model_dump(exclude={"weights"}, exclude_defaults=True), "width": at}
