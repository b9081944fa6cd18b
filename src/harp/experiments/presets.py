"""What `harp prune` takes for granted: a recipe from a few flags, with the usual settings of each data set."""

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
    usual = preset.epochs if objective != "free" else _replayed(preset.epochs, bool(PRUNERS[name].finetuning))
    lengths = [length if given is None else given for given, length in zip(epochs, usual, strict=True)]
    threat: dict[str, Any] = {}
    if objective != "natural":
        step = preset.step if epsilon is None else read_number("epsilon", epsilon) / 4
        threat = {"epsilon": epsilon or preset.epsilon}
        threat |= {} if objective in pipeline.ONE_STEP else {"step": step}
    pruner: dict[str, Any] = {"name": name, **options, "keep": keep}
    training = {"name": objective, **threat}
    stages = pipeline.stages(
        pruner,
        [] if weights is not None else [{"name": "pretrain", "epochs": lengths[0]}],
        {"name": "prune", "epochs": lengths[1]},
        {"name": "finetune", "epochs": lengths[2], "optimizer": {"lr": 0.01}},
        training,
    )
    described: dict[str, Any] = {"name": model} if weights is None else {"name": model, "weights": weights}
    units: dict[str, Any] = {"kind": "channels"} if channels else {}
    units |= {"budget": budget} if budget is not None else {}
    units |= {"multiple": multiple} if multiple != 1 else {}
    title = f"{method}-{'channels-' if channels else ''}{model.rpartition('/')[2]}-{keep}"
    words = "".join(letter if letter.isalnum() else "-" for letter in title)
    return {
        "name": words.strip("-"),
        "seed": seed,
        "data": {"name": data, "batch": batch, "pad": preset.pad},
        "model": described,
        "units": {**units, "ignore": ignore},
        "objective": training,
        "stages": stages,
        "evaluate": {"attacks": ["pgd-20"], **({"epsilon": epsilon or preset.epsilon} if threat == {} else {})},
    }


def _replayed(epochs: tuple[int, int, int], own_loss: bool) -> tuple[int, int, int]:
    """The lengths of Free-AT: an epoch stands for as many as it replays. Fine-tuning by a loss of its own has none."""
    pretrain, prune, finetune = map(compose.replayed, epochs)
    return pretrain, prune, epochs[2] if own_loss else finetune


def read_number(what: str, text: str) -> float:
    """A flag's number, written as in a recipe."""
    try:
        return float(number(text))
    except ValueError as error:
        raise RecipeError(f"{what}: {error}") from error
