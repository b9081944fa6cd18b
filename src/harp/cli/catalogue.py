"""The contents of `harp list`: a name and a description for each entry."""

from harp.data.registry import DATASETS
from harp.errors import RecipeError
from harp.experiments import compose, study
from harp.experiments.recipe import Recipe, unknown
from harp.models import MODELS
from harp.pruning.allocation import STRATEGIES
from harp.pruning.methods import PRUNERS
from harp.training.objectives import OBJECTIVES


def rows(what: str, containing: str = "") -> list[tuple[str, str]]:
    """The names and descriptions of one list, filtered by a text that they contain."""
    if what not in _KINDS:
        raise RecipeError(unknown("list", what, _KINDS))
    entries = _KINDS[what]()
    matches = [row for row in entries if containing.lower() in " ".join(row).lower()]
    if not matches:
        raise RecipeError(unknown(what, containing, [name for name, _ in entries]))
    return matches


def axes(base: str) -> list[tuple[str, str]]:
    """The options that replace a part of a base recipe; `base` is used in the examples."""
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


def _methods() -> list[tuple[str, str]]:
    texts = {name: (pruner.__doc__ or "").strip() for name, pruner in PRUNERS.items()}
    return [(name, text.partition("\n")[0]) for name, text in texts.items()]


def _models() -> list[tuple[str, str]]:
    own = [(name, entry.description) for name, entry in MODELS.items()]
    others = [
        ("torchvision:NAME", "any classifier of torchvision"),
        ("timm:NAME", "any classifier of timm"),
        ("path/to/file.py:function", "a function of yours that returns a module"),
    ]
    return own + others


def _data() -> list[tuple[str, str]]:
    return [(name, source.description) for name, source in DATASETS.items()]


def _recipes() -> list[tuple[str, str]]:
    return [(name, _described(compose.load(name))) for name in compose.shipped()]


def _described(recipe: Recipe) -> str:
    """The description of a recipe, with its own method, objective and budget."""
    pruner = next(stage.pruner for stage in recipe.stages if "keep" in stage.pruner)
    return f"{recipe.description} ({pruner['name']}, {recipe.objective['name']}, keep {100 * pruner['keep']:g}%)"


def _studies() -> list[tuple[str, str]]:
    return [(name, content["description"]) for name, content in study.shipped().items()]


_KINDS = {"methods": _methods, "models": _models, "data": _data, "recipes": _recipes, "studies": _studies}
