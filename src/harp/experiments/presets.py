"""The recipe of `harp prune`: from a few options, with the usual settings of each data set."""

from collections.abc import Sequence
from typing import Any

from harp.attacks import length
from harp.data.datasets.base import Preset
from harp.data.registry import DATASETS
from harp.errors import RecipeError
from harp.experiments import compose
from harp.experiments.stages import ONE_STEP, Parts, protocol_of
from harp.models import has_weights
from harp.models.normalize import constants
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
    include: Sequence[str] = (),
    channels: bool = False,
    budget: str | None = None,
    multiple: int = 1,
    size: int | None = None,
    normalize: str | None = None,
    protocol: str = "given",
) -> dict[str, Any]:
    """The content of a recipe that pre-trains (unless weights are given), prunes and fine-tunes.

    `keep` is a share of the weights, or of the FLOPs of `channels`, unless a `budget` says what else it counts. The
    `protocol` lays out the stages: by default they have the lengths that are given.
    """
    name, options = compose.read_method(method, strategy)
    if has_weights(model) and weights is not None:
        raise RecipeError(f"--weights {weights}: {model} has weights of its own")
    preset = DATASETS[data].preset if data in DATASETS else Preset()
    names = ("pretrain", "prune", "finetune")
    first, second, third = ({"name": n, "epochs": length} for n, length in zip(names, preset.epochs, strict=True))
    usual = Parts([first], second, {**third, "optimizer": {"lr": 0.01}})
    if objective == "free":
        usual = usual.replayed(bool(PRUNERS[name].finetuning))
    pretrain, prune, finetune = (
        stage if given is None else {**stage, "epochs": given}
        for given, stage in zip(epochs, (usual.pretrain[0], usual.prune, usual.finetune), strict=True)
    )
    training: dict[str, Any] = {"name": objective}
    evaluation: dict[str, Any] = {"attacks": ["pgd-20"]}
    (evaluation if objective == "natural" else training)["epsilon"] = epsilon or preset.epsilon
    if objective != "natural" and objective not in ONE_STEP:
        training["step"] = preset.step if epsilon is None else length("epsilon", epsilon) / 4
    parts = Parts([] if has_weights(model) or weights is not None else [pretrain], prune, finetune)
    units: dict[str, Any] = {"kind": "channels"} if channels else {}
    units |= {"budget": budget} if budget is not None else {}
    units |= {"multiple": multiple} if multiple != 1 else {}
    units |= {"include": list(include)} if include else {}
    title = f"{method}-{'channels-' if channels else ''}{_short(model)}-{keep}"
    return {
        "name": "".join(letter if letter.isalnum() else "-" for letter in title).strip("-"),
        "seed": seed,
        "data": {"name": data, "batch": batch, "pad": preset.pad} | ({} if size is None else {"size": size}),
        "model": {"name": model}
        | ({} if weights is None else {"weights": weights})
        | ({} if normalize is None else {"normalize": [list(values) for values in constants(normalize)]}),
        "units": {**units, "ignore": ignore},
        "objective": training,
        "stages": protocol_of(protocol).stages(parts, {"name": name, **options, "keep": keep}, training),
        "evaluate": evaluation,
    }


def _short(model: str) -> str:
    """The part of a model's name that tells it from others."""
    published, colon, _ = model.removeprefix("robustbench:").partition(":")
    return published if colon and model.startswith("robustbench:") else model.rpartition("/")[2]
