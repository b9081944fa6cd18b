"""The place of a run in the taxonomy of the Adversarial Pruning Benchmark.

Piras, Pintor, Demontis, Biggio, Giacinto, Roli: "Adversarial Pruning: A Survey and Benchmark of Pruning Methods for
Adversarial Robustness", 2024. A method is described by when it prunes (after, before or during training) and how: the
objectives of its trainings, at once or in rounds, single weights or structures, by layers or over the whole network,
and by what criterion. The keys and the words are those of the benchmark's file, odd blanks and colons included.
"""

from collections.abc import Mapping
from typing import Any

from harp.errors import RecipeError
from harp.experiments.recipe import Recipe, Stage
from harp.pruning.methods import PRUNERS, Pruner
from harp.pruning.papers import Locality, Structure
from harp.training.objectives import OBJECTIVES

PIPELINE = "Type of Pipeline:"
AFTER = "A-Methods Pruning After Training"
BEFORE = "B-Methods Pruning Before Training"
DURING = "D-Methods Pruning During Training"
STEPS = {
    AFTER: ("A: Pretraining ", "A: Finetuning", "A: OneShot (1S) vs Iterative (IT)"),
    BEFORE: ("B: Pruning step ", "B: Training step ", "B: OneShot (1S) vs Iterative (IT)"),
    DURING: ("D: Training step ",),
}
SPECIFICS = ("Pruning structure", "Pruning locality", "Pruning criterion")

UNSPECIFIED, NONE = "Not Specified", "None"

# Strategies that rank the weights of all layers together; methods with rates of other strategies are local.
_ACROSS_LAYERS = ("lamp", "global")


def keys(pipeline: str) -> tuple[str, ...]:
    """The keys of an entry, in the benchmark's order."""
    return ("link_to_paper", "ap_key", PIPELINE, *STEPS[pipeline], *SPECIFICS)


def method(recipe: Recipe) -> type[Pruner]:
    """The method that a recipe prunes by, the last of several."""
    return PRUNERS[_pruning(recipe)[-1].pruner["name"]]


def structure(recipe: Recipe) -> Structure:
    """What a recipe prunes: single weights or channels, which some methods take out by themselves."""
    own = method(recipe).taxonomy
    if recipe.units.kind == "channels":
        return Structure.CHANNELS
    return Structure.WEIGHTS if own is None else own.structure


def entry(recipe: Recipe, ap_key: str, paper: str) -> dict[str, str]:
    """The entry of the method that a recipe describes."""
    stages, kind = _pruning(recipe), method(recipe)
    stage, order = stages[-1], recipe.stages
    earlier = [other for other in order[: order.index(stages[0])] if other.epochs]
    later = [other for other in order[order.index(stage) + 1 :] if other.epochs]
    rounds = "1S" if len(stages) == 1 else "IT"
    learned = _training(recipe, stage) if stage.epochs else NONE
    if kind.from_scratch:
        pipeline, steps = DURING, [_training(recipe, later[-1] if later else stage)]
    elif earlier or recipe.model.weights is not None:
        pipeline = AFTER
        steps = [_training(recipe, earlier[-1]) if earlier else UNSPECIFIED]
        steps += [_training(recipe, later[-1]) if later else learned, rounds]
    else:
        pipeline, steps = BEFORE, [learned, _training(recipe, later[-1]) if later else NONE, rounds]
    criterion = UNSPECIFIED if kind.taxonomy is None else kind.taxonomy.criterion
    values = [paper, ap_key, pipeline, *steps, structure(recipe), _locality(kind, stage.pruner), criterion]
    return dict(zip(keys(pipeline), values, strict=True))


def _pruning(recipe: Recipe) -> list[Stage]:
    stages = [stage for stage in recipe.stages if stage.pruner["name"] not in ("dense", "fixed")]
    if not stages:
        raise RecipeError(f"{recipe.name}: no stage prunes, so there is no pruning method to submit")
    return stages


def _training(recipe: Recipe, stage: Stage) -> str:
    return OBJECTIVES[recipe.stage_objective(stage)["name"]].taxonomy or UNSPECIFIED


def _locality(kind: type[Pruner], pruner: Mapping[str, Any]) -> str:
    if kind.taxonomy is None:
        return UNSPECIFIED
    if kind.taxonomy.locality is not None:
        return kind.taxonomy.locality
    strategy = pruner.get("strategy") or kind.taxonomy.strategy
    return Locality.GLOBAL if isinstance(strategy, str) and strategy in _ACROSS_LAYERS else Locality.LOCAL
