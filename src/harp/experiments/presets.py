"""The recipe of `harp prune`: from a few options, with the usual settings of each data set."""

from typing import Any

from harp.data.datasets.base import Preset
from harp.data.registry import DATASETS
from harp.errors import RecipeError
from harp.experiments import compose
from harp.experiments import stages as pipeline
from harp.experiments.recipe import number
from harp.pruning.methods import PRUNERS

BEST = {"weights": "tandem", "channels": "magnitude"}
"""The method of `harp prune` unless one is named, by what is pruned: the best measured, see `benchmarks/README.md`."""


def recipe(
    model: str,
    data: str,
    keep: str,
    *,
    method: str,
    strategy: str | None,
    objective: str,
    epsilon: str | None,
    weights: str | None,
    epochs: tuple[int | None, int | None, int | None],
    batch: int,
    seed: int,
    ignore: list[str],
    channels: bool = False,
    budget: str | None = None,
    multiple: int = 1,
) -> dict[str, Any]:
    """The content of a recipe that pre-trains (unless weights are given), prunes and fine-tunes.

    `keep` is a share of the weights, or of the FLOPs of `channels`, unless a `budget` says what else it counts.
    """
    name, options = compose.read_method(method, strategy)
    preset = DATASETS[data].preset if data in DATASETS else Preset()
    usual = list(preset.epochs)
    if objective == "free":  # fine-tuning under a loss of the method's own keeps its length
        shorter = [compose.replayed(length) for length in usual]
        usual = [*shorter[:2], usual[2] if PRUNERS[name].finetuning else shorter[2]]
    pretrain, prune, finetune = (n if given is None else given for given, n in zip(epochs, usual, strict=True))
    training: dict[str, Any] = {"name": objective}
    evaluation: dict[str, Any] = {"attacks": ["pgd-20"]}
    (evaluation if objective == "natural" else training)["epsilon"] = epsilon or preset.epsilon
    if objective != "natural" and objective not in pipeline.ONE_STEP:
        training["step"] = preset.step if epsilon is None else read_number("epsilon", epsilon) / 4
    stages = pipeline.stages(
        {"name": name, **options, "keep": keep},
        [] if weights is not None else [{"name": "pretrain", "epochs": pretrain}],
        {"name": "prune", "epochs": prune},
        {"name": "finetune", "epochs": finetune, "optimizer": {"lr": 0.01}},
        training,
    )
    units: dict[str, Any] = {"kind": "channels"} if channels else {}
    units |= {"budget": budget} if budget is not None else {}
    units |= {"multiple": multiple} if multiple != 1 else {}
    title = f"{method}-{'channels-' if channels else ''}{model.rpartition('/')[2]}-{keep}"
    return {
        "name": "".join(letter if letter.isalnum() else "-" for letter in title).strip("-"),
        "seed": seed,
        "data": {"name": data, "batch": batch, "pad": preset.pad},
        "model": {"name": model} if weights is None else {"name": model, "weights": weights},
        "units": {**units, "ignore": ignore},
        "objective": training,
        "stages": stages,
        "evaluate": evaluation,
    }


def read_number(what: str, text: str) -> float:
    """The number of an option, written as in a recipe."""
    try:
        return float(number(text))
    except ValueError as error:
        raise RecipeError(f"{what}: {error}") from error
