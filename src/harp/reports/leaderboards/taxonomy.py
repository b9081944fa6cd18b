"""Where a run stands in the taxonomy of the Adversarial Pruning Benchmark.

Piras, Pintor, Demontis, Biggio, Giacinto, Roli: "Adversarial Pruning: A Survey and Benchmark of Pruning Methods for
Adversarial Robustness", 2024. A method is described by when it prunes (after, before or during training) and how: the
objectives of its trainings, at once or in rounds, single weights or structures, by layers or over the whole network,
and by what criterion. The keys and the words are those of the benchmark's file, odd blanks and colons included.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harp.errors import RecipeError
from harp.pruners import PRUNERS
from harp.recipe import Recipe, Stage

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

LOCAL, GLOBAL = "Local Pruning (L)", "Global Pruning (G)"
WEIGHTS, CHANNELS = "Unstructured (US)", "Structured (S) channels"
LWM = "Lowest Weight Magnitude LWM"
SOLVER = "Solver Based LWM (SOLWM)"
REGULARISED = "Sparsity Based LWM (SPALWM)"
SCORE = "Least Importance Score (LIS)"
SAMPLING = "Bayesian Connectivity Sampling (BCS)"
CHANCE = "Random"
UNSPECIFIED, NONE = "Not Specified", "None"

# None of our objectives distils, so Knowledge Distillation (KD) does not occur.
OBJECTIVES = {
    "natural": "Natural Training (NT)",
    "pgd": "Adversarial Training (AT) PGD",
    "fast": "Adversarial Training (AT) Fast",
    "free": "Adversarial Training (AT) Free",
    "trades": "Adversarial Training (AT) TRADES",
    "mart": "Adversarial Training (AT) MART",
}


@dataclass(frozen=True)
class Kind:
    """A method: its criterion, and its locality where no strategy of the recipe decides it."""

    criterion: str
    locality: str | None = None
    strategy: str | None = "uniform"  # the default of the method's option
    structure: str = WEIGHTS


# Published methods are put where the benchmark's own file has them. Where that file and the benchmark's page differ
# (DNR: a learned score or a solver), the file counts. Methods whose rates come from a strategy are local, unless the
# strategy compares weights across layers.
KINDS: Mapping[str, Kind] = {
    "random": Kind(CHANCE),
    "magnitude": Kind(LWM),
    "global": Kind(LWM, GLOBAL),
    "erk": Kind(LWM, LOCAL),
    "lamp": Kind(LWM, GLOBAL),
    "hydra": Kind(SCORE),
    "harp": Kind(SCORE, GLOBAL),
    "harp-s": Kind(SCORE, LOCAL),
    "harp-r": Kind(LWM, GLOBAL),
    "tandem": Kind(SCORE, strategy="lamp"),
    "r-admm": Kind(SOLVER),
    "dnr": Kind(SCORE, GLOBAL),
    "anp-vs": Kind(SCORE, GLOBAL, structure=CHANNELS),
    "mad": Kind(SCORE, strategy="global"),
    "bcs-p": Kind(SAMPLING, strategy="global"),
    "flying-bird": Kind(LWM, GLOBAL),
    "flying-bird+": Kind(LWM, GLOBAL),
    "twinrep": Kind(REGULARISED, GLOBAL),
}
_ACROSS_LAYERS = ("lamp", "global")  # strategies that rank the weights of all layers together


def keys(pipeline: str) -> tuple[str, ...]:
    """The keys of an entry, in the benchmark's order."""
    return ("link_to_paper", "ap_key", PIPELINE, *STEPS[pipeline], *SPECIFICS)


def structure(made: Recipe) -> str:
    """What a recipe prunes: single weights or channels, which some methods take out by themselves."""
    return CHANNELS if made.units.kind == "channels" else KINDS[_pruning(made)[-1].pruner["name"]].structure


def entry(made: Recipe, ap_key: str, paper: str) -> dict[str, str]:
    """The entry of the method that a recipe describes."""
    stages = _pruning(made)
    stage = stages[-1]
    name = stage.pruner["name"]
    kind = KINDS[name]
    place = made.stages.index(stage)
    earlier = [each for each in made.stages[: made.stages.index(stages[0])] if each.epochs]
    later = [each for each in made.stages[place + 1 :] if each.epochs]
    rounds = "1S" if len(stages) == 1 else "IT"
    learned = _training(made, stage) if stage.epochs else NONE
    if PRUNERS[name].from_scratch:
        pipeline, steps = DURING, [_training(made, later[-1] if later else stage)]
    elif earlier or made.model.weights is not None:
        pipeline = AFTER
        steps = [_training(made, earlier[-1]) if earlier else UNSPECIFIED]
        steps += [_training(made, later[-1]) if later else learned, rounds]
    else:
        pipeline, steps = BEFORE, [learned, _training(made, later[-1]) if later else NONE, rounds]
    values = [paper, ap_key, pipeline, *steps, structure(made), _locality(kind, stage.pruner), kind.criterion]
    return dict(zip(keys(pipeline), values, strict=True))


def _pruning(made: Recipe) -> list[Stage]:
    found = [stage for stage in made.stages if stage.pruner["name"] not in ("dense", "fixed")]
    if not found:
        raise RecipeError(f"{made.name}: no stage prunes, so there is no pruning method to submit")
    return found


def _training(made: Recipe, stage: Stage) -> str:
    return OBJECTIVES[made.stage_objective(stage)["name"]]


def _locality(kind: Kind, pruner: Mapping[str, Any]) -> str:
    if kind.locality is not None:
        return kind.locality
    strategy = pruner.get("strategy") or kind.strategy
    return GLOBAL if isinstance(strategy, str) and strategy in _ACROSS_LAYERS else LOCAL
