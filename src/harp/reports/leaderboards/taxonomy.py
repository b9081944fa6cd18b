"""Where a run stands in the taxonomy of the Adversarial Pruning Benchmark.

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

# Strategies that rank the weights of all layers together: methods whose rates come from others are local.
_ACROSS_LAYERS = ("lamp", "global")


def keys(pipeline: str) -> tuple[str, ...]:
    """The keys of an entry, in the benchmark's order."""
    return ("link_to_paper", "ap_key", PIPELINE, *STEPS[pipeline], *SPECIFICS)


def method(made: Recipe) -> type[Pruner]:
    """The method that a recipe prunes by, the last of several."""
    return PRUNERS[_pruning(made)[-1].pruner["name"]]


def structure(made: Recipe) -> Structure:
    """What a recipe prunes: single weights or channels, which some methods take out by themselves."""
    own = method(made).taxonomy
    if made.units.kind == "channels":
        return Structure.CHANNELS
    return Structure.WEIGHTS if own is None else own.structure


def entry(made: Recipe, ap_key: str, paper: str) -> dict[str, str]:
    """The entry of the method that a recipe describes."""
    stages = _pruning(made)
    stage = stages[-1]
    kind = method(made)
    place = made.stages.index(stage)
    earlier = [each for each in made.stages[: made.stages.index(stages[0])] if each.epochs]
    later = [each for each in made.stages[place + 1 :] if each.epochs]
    rounds = "1S" if len(stages) == 1 else "IT"
    learned = _training(made, stage) if stage.epochs else NONE
    if kind.from_scratch:
        pipeline, steps = DURING, [_training(made, later[-1] if later else stage)]
    elif earlier or made.model.weights is not None:
        pipeline = AFTER
        steps = [_training(made, earlier[-1]) if earlier else UNSPECIFIED]
        steps += [_training(made, later[-1]) if later else learned, rounds]
    else:
        pipeline, steps = BEFORE, [learned, _training(made, later[-1]) if later else NONE, rounds]
    criterion = UNSPECIFIED if kind.taxonomy is None else kind.taxonomy.criterion
    values = [paper, ap_key, pipeline, *steps, structure(made), _locality(kind, stage.pruner), criterion]
    return dict(zip(keys(pipeline), values, strict=True))


def _pruning(made: Recipe) -> list[Stage]:
    found = [stage for stage in made.stages if stage.pruner["name"] not in ("dense", "fixed")]
    if not found:
        raise RecipeError(f"{made.name}: no stage prunes, so there is no pruning method to submit")
    return found


def _training(made: Recipe, stage: Stage) -> str:
    return OBJECTIVES[made.stage_objective(stage)["name"]].taxonomy or "Not Specified"


def _locality(kind: type[Pruner], pruner: Mapping[str, Any]) -> str:
    if kind.taxonomy is None:
        return UNSPECIFIED
    if kind.taxonomy.locality is not None:
        return kind.taxonomy.locality
    strategy = pruner.get("strategy") or kind.taxonomy.strategy
    return Locality.GLOBAL if isinstance(strategy, str) and strategy in _ACROSS_LAYERS else Locality.LOCAL
