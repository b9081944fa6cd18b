"""The command `harp list`, and its lists: a name and a description for each entry.

The lists stand in `names.json`, so that the command need not load torch, which takes seconds. `scripts/make-names`
writes that file; a test compares it with what HARP really knows.
"""

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from harp.cli import options
from harp.cli.output import print_json
from harp.errors import RecipeError
from harp.system.nearest import unknown

Rows = list[tuple[str, str]]

NAMES = Path(__file__).with_name("names.json")
KINDS = ("methods", "models", "data", "recipes", "studies")


def list_(
    what: Annotated[str, Argument(help="methods, models, data, recipes or studies.")],
    containing: Annotated[str, Argument(help="Only those whose name or description contains this.")] = "",
    as_json: options.Json = False,
) -> None:
    """List the methods, models, data sets, recipes or studies that HARP knows.

    Example: harp list recipes svhn
    """
    entries = rows(what, containing)
    if as_json:
        print_json({"list": what, "entries": [{"name": name, "description": text} for name, text in entries]})
        return
    from harp.system.progress import Terminal

    Terminal().table("", (what, ""), entries)
    if what == "recipes":
        example = next((name for name, _ in entries if "/" in name), entries[0][0])
        Terminal().table("\nwhat options put in place of a recipe's own", ("option", ""), recipe_options(example))


def rows(what: str, containing: str = "") -> Rows:
    """The names and descriptions of one list, filtered by a text that they contain."""
    if what not in KINDS:
        raise RecipeError(unknown("list", what, KINDS))
    entries = _methods() if what == "methods" else [(name, text) for name, text in _names()[what]]
    matches = [row for row in entries if containing.lower() in " ".join(row).lower()]
    if not matches:
        raise RecipeError(unknown(what, containing, [name for name, _ in entries]))
    return matches


def recipe_options(base: str) -> Rows:
    """The options that replace a part of a base recipe; `base` is used in the examples."""
    names = _names()
    objective = "free" if names["objective_of"][base] == "free" else "trades"
    methods = [name for name, _ in _methods() if name not in ("dense", "fixed")]
    return [
        ("--method", f"{', '.join(methods)}; also NAME:option=value,option=value"),
        ("--strategy", f"{', '.join(names['strategies'])}: where the budget goes"),
        ("--keep", "the share that is kept: 1%, 0.01 or 1/100"),
        ("--objective", f"{', '.join(names['objectives'])}; what trains by free stays with it"),
        ("--channels", "prune whole channels; --keep is of the FLOPs"),
        ("example", f"harp run {base} --method hydra --strategy lamp --keep 0.1% --objective {objective}"),
        ("in one word", f"harp run {base}/hydra-lamp-{objective}-99.9, by the per cent that are pruned"),
        ("channels", f"harp run {base}/harp-channels-4x, by what the FLOPs are divided by"),
    ]


def _names() -> dict[str, Any]:
    names: dict[str, Any] = json.loads(NAMES.read_text(encoding="utf-8"))
    return names


def _methods() -> Rows:
    """The methods, with those of other packages, which only their code can describe."""
    if entry_points(group="harp.methods"):
        return _described_methods()
    return [(name, text) for name, text in _names()["methods"]]


def _described_methods() -> Rows:
    from harp.pruning.methods import PRUNERS

    return [(name, (cls.__doc__ or "").strip().partition("\n")[0]) for name, cls in PRUNERS.items()]


def known() -> dict[str, Any]:
    """What `names.json` holds, from the modules themselves."""
    from harp.data.registry import DATASETS
    from harp.experiments import compose, study
    from harp.models import MODELS, zoo
    from harp.pruning.allocation import STRATEGIES
    from harp.training.objectives import OBJECTIVES

    others = [
        *((f"zoo:{name}", _zoo_text(zoo.card(name))) for name in zoo.names()),
        ("torchvision:NAME", "any classifier of torchvision"),
        ("timm:NAME", "any classifier of timm"),
        ("robustbench:NAME:FILE", "a checkpoint of RobustBench that you downloaded, with its normalisation"),
        ("hf:OWNER/NAME", "a network that `harp push` wrote to the Hugging Face Hub; @REVISION may follow"),
        ("path/to/file.py:function", "a function of yours that returns a module"),
    ]
    lists = {
        "methods": _described_methods(),
        "models": [*((name, entry.description) for name, entry in MODELS.items()), *others],
        "data": [(name, source.description) for name, source in DATASETS.items()],
        "recipes": [(name, _recipe_text(name)) for name in compose.shipped()],
        "studies": [(name, content["description"]) for name, content in study.shipped().items()],
    }
    return {
        **{kind: [list(row) for row in entries] for kind, entries in lists.items()},
        "strategies": list(STRATEGIES),
        "objectives": list(OBJECTIVES),
        "objective_of": {name: compose.load(name).objective["name"] for name in compose.shipped()},
    }


def _zoo_text(card: dict[str, Any]) -> str:
    """A network of the zoo: its data, how many weights it keeps, and what it reaches."""
    results = ", ".join(f"{row['test']} {row['accuracy']:.1%}" for row in card["results"])
    return f"trained on {card['data']}, {card['kept']:,} weights: {results} (epsilon {card['epsilon']:g})"


def _recipe_text(name: str) -> str:
    """The description of a recipe, with its method, objective and budget."""
    from harp.experiments import compose

    recipe = compose.load(name)
    pruner = next(stage.pruner for stage in recipe.stages if "keep" in stage.pruner)
    return f"{recipe.description} ({pruner['name']}, {recipe.objective['name']}, keep {100 * pruner['keep']:g}%)"
