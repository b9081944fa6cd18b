"""The command `harp plan`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from harp.cli import options
from harp.cli.output import note_if_slow, print_json

if TYPE_CHECKING:
    from harp.experiments.plan import Subject
    from harp.experiments.recipe import Recipe


def plan(
    model: Annotated[str, Argument(help="A model as in `harp doctor`, or a recipe as in `harp run`.")],
    keep: options.Keep = None,
    strategy: options.Strategy = None,
    channels: options.Channels = False,
    budget: options.Budget = None,
    multiple: options.Multiple = 1,
    data: options.ShapeData = None,
    data_dir: options.DataDir = None,
    weights: options.Weights = None,
    classes: options.Classes = None,
    shape: options.Shape = None,
    size: options.Size = None,
    normalize: options.Normalize = None,
    as_published: Annotated[bool, Option("--as-published", help="Round each layer on its own, as papers do.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show how a strategy spreads a budget over the layers, or over the channels, and what the network would cost.

    Example: harp plan resnet18 --keep 1% --strategy lamp

    The network, the budget and the strategy of a recipe, unless others are given: harp plan cifar10/vgg16 --keep 0.1%
    """
    from harp.errors import RecipeError
    from harp.experiments import compose
    from harp.experiments.plan import Subject, spread, totals
    from harp.models import MODELS
    from harp.reports import tables
    from harp.system import numbers
    from harp.system.nearest import unknown
    from harp.system.progress import Terminal

    display = Terminal()
    subject, limits = (
        Subject(model, data, data_dir, weights, classes, shape, size=size, normalize=normalize),
        dict[str, Any](),
    )
    if compose.is_recipe(model) or compose.base_of(model) is not None:
        recipe = compose.load(model, choice=compose.Choice(keep=keep, channels=channels))
        subject, limits = _of_recipe(recipe, subject), recipe.units.options()
        pruner = next((stage.pruner for stage in recipe.stages if "keep" in stage.pruner), {})
        keep, channels = keep or pruner.get("keep"), recipe.units.kind == "channels"
        strategy = strategy or pruner.get("strategy") or pruner.get("initial_strategy")
    elif model.isidentifier() and model not in MODELS:
        raise RecipeError(unknown("model or recipe", model, [*MODELS, *compose.shipped()]))
    if keep is None:
        raise RecipeError(f"how much of {model} is to be kept? Say it like --keep 1%")
    strategy, share = strategy or "uniform", numbers.share(keep)
    limits |= {"budget": budget} if budget is not None else {}
    limits |= {"multiple": multiple} if multiple != 1 else {}
    with note_if_slow(display, "following the channels through the model" * channels):
        units = subject.units(channels=channels, **limits)
    layers = spread(units, strategy, share, as_published=as_published)
    costs = totals(units, [layer["kept"] for layer in layers])
    if as_json:
        sizes = {name: {"size": before, "kept": after} for name, (before, after) in costs.items()}
        print_json({"kind": units.kind, "layers": layers, "totals": sizes})
        return
    title = f"{model}, {strategy}, keep {keep} of the {units.noun}"
    display.table(title, tables.layer_columns(units.kind), tables.layer_rows(layers))
    if units.noun != units.kind:
        rows = [[name, f"{a:,}", f"{b:,}", f"{b / a:.3%}"] for name, (a, b) in costs.items()]
        display.table("\nthe whole network", ("", "before", "after", "rate"), rows)


def _of_recipe(recipe: "Recipe", given: "Subject") -> "Subject":
    """The network of a recipe, with the options that were given in place of its own."""
    from harp.experiments.estimate.sizes import Sizes

    weights = given.weights or (Path(recipe.model.weights) if recipe.model.weights else None)
    subject = replace(given, spec=recipe.model.name, weights=weights, options=recipe.model.options)
    sizes = Sizes.of(recipe, given.data_dir) if given.data_name is None else None
    if sizes is None:
        return subject
    return replace(
        subject, classes=given.classes or sizes.classes, shape=given.shape or "x".join(map(str, sizes.shape))
    )
