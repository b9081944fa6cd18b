"""The command `harp list`, and its lists: a name and a description for each entry."""

from collections.abc import Callable
from typing import Annotated

from typer import Argument

from harp.cli import options
from harp.cli.output import print_json

Rows = list[tuple[str, str]]


def list_(
    what: Annotated[str, Argument(help="methods, models, data, recipes or studies.")],
    containing: Annotated[str, Argument(help="Only those whose name or description contains this.")] = "",
    as_json: options.Json = False,
) -> None:
    """List the methods, models, data sets, recipes or studies that HARP knows.

    Example: harp list recipes svhn
    """
    from harp.system.progress import Terminal

    entries = rows(what, containing)
    if as_json:
        print_json([{"name": name, "description": text} for name, text in entries])
        return
    Terminal().table("", (what, ""), entries)
    if what == "recipes":
        example = next((name for name, _ in entries if "/" in name), entries[0][0])
        Terminal().table("\nwhat options put in place of a recipe's own", ("option", ""), recipe_options(example))


def rows(what: str, containing: str = "") -> Rows:
    """The names and descriptions of one list, filtered by a text that they contain."""
    from harp.data.registry import DATASETS
    from harp.errors import RecipeError
    from harp.experiments import compose, study
    from harp.experiments.recipe import unknown
    from harp.models import MODELS
    from harp.pruning.methods import PRUNERS

    others = [
        ("torchvision:NAME", "any classifier of torchvision"),
        ("timm:NAME", "any classifier of timm"),
        ("path/to/file.py:function", "a function of yours that returns a module"),
    ]
    lists: dict[str, Callable[[], Rows]] = {
        "methods": lambda: [(name, (cls.__doc__ or "").strip().partition("\n")[0]) for name, cls in PRUNERS.items()],
        "models": lambda: [*((name, entry.description) for name, entry in MODELS.items()), *others],
        "data": lambda: [(name, source.description) for name, source in DATASETS.items()],
        "recipes": lambda: [(name, _recipe_text(name)) for name in compose.shipped()],
        "studies": lambda: [(name, content["description"]) for name, content in study.shipped().items()],
    }
    if what not in lists:
        raise RecipeError(unknown("list", what, lists))
    entries = lists[what]()
    matches = [row for row in entries if containing.lower() in " ".join(row).lower()]
    if not matches:
        raise RecipeError(unknown(what, containing, [name for name, _ in entries]))
    return matches


def _recipe_text(name: str) -> str:
    """The description of a recipe, with its method, objective and budget."""
    from harp.experiments import compose

    recipe = compose.load(name)
    pruner = next(stage.pruner for stage in recipe.stages if "keep" in stage.pruner)
    return f"{recipe.description} ({pruner['name']}, {recipe.objective['name']}, keep {100 * pruner['keep']:g}%)"


def recipe_options(base: str) -> Rows:
    """The options that replace a part of a base recipe; `base` is used in the examples."""
    from harp.experiments import compose
    from harp.pruning.allocation import STRATEGIES
    from harp.training.objectives import OBJECTIVES

    own = compose.load(base).objective["name"]
    objective = own if own == "free" else "trades"
    return [
        ("--method", f"{', '.join(compose.methods())}; also NAME:option=value,option=value"),
        ("--strategy", f"{', '.join(STRATEGIES)}: where the budget goes"),
        ("--keep", "the share that is kept: 1%, 0.01 or 1/100"),
        ("--objective", f"{', '.join(OBJECTIVES)}; what trains by free stays with it"),
        ("--channels", "prune whole channels; --keep is of the FLOPs"),
        ("example", f"harp run {base} --method hydra --strategy lamp --keep 0.1% --objective {objective}"),
        ("in one word", f"harp run {base}/hydra-lamp-{objective}-99.9, by the per cent that are pruned"),
        ("channels", f"harp run {base}/harp-channels-4x, by what the FLOPs are divided by"),
    ]
