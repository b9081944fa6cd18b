"""Names as people say them: of methods, models and data sets, for titles, legends and rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harp.data.registry import DATASETS
from harp.experiments.recipe import Recipe
from harp.pruning.methods import PRUNERS

_ACRONYMS = {"erk": "ERK", "lamp": "LAMP", "igq": "IGQ"}


def method(pruner: Mapping[str, Any]) -> str:
    """A pruner and the strategy that spreads its budget: HYDRA + LAMP.

    A title that begins with a small letter describes the method, it names none: there the recipe's name is used.
    """
    key, strategy = str(pruner.get("name", "unnamed")), pruner.get("strategy")
    title = PRUNERS[key].title if key in PRUNERS else ""
    name = title.split(" (")[0].split(",")[0] if title and title[0].isupper() else _ACRONYMS.get(key, key)
    if strategy is None:
        return name
    return f"{name} + {_ACRONYMS.get(strategy, strategy) if isinstance(strategy, str) else 'given rates'}"


def model(name: str) -> str:
    """A model; one of a user's file goes by the name of the file."""
    file, colon, _ = name.rpartition(":")
    return Path(file).stem if colon and file.endswith(".py") else name


def data(name: str) -> str:
    """A data set: what it is called in `harp list data`; of a file its name."""
    known = DATASETS.get(name)
    return Path(name).stem if known is None else known.description.split(":")[0].split(",")[0].split(" (")[0]


def budget(share: float, unit: str = "weights") -> str:
    """A budget in short: 10 %, or 25 % FLOPs."""
    return f"{100 * share:.3g} %" + ("" if unit == "weights" else f" {unit}")


def run(recipe: Recipe) -> str:
    """The network of a recipe."""
    pruner = next((stage.pruner for stage in reversed(recipe.stages) if stage.prunes), {"name": "dense"})
    label = method(pruner)
    if "keep" in pruner:
        label += f", {budget(float(pruner['keep']))}"
    return network(label, recipe.model.name, recipe.data.name)


def network(label: str, model_name: str, data_name: str) -> str:
    """A network in a title: HARP, 10 % – my_net on CIFAR-10."""
    return f"{label} – {model(model_name)} on {data(data_name)}"
