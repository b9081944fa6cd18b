"""The stages that a method takes, laid out from lengths that all methods share.

Fair is: the same epochs for everybody, spent as the method's paper spends them. A method that learns its masks prunes
and fine-tunes a pre-trained network; one that finds them at once fine-tunes longer; one that trains sparse from random
weights gets all epochs in one stage. The learning rates stay those of the stages that the epochs come from.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harp.allocate import READS_WEIGHTS
from harp.errors import RecipeError
from harp.pruners import PRUNERS

_Stage = Mapping[str, Any]
_THREAT = ("epsilon", "step", "steps", "norm")
ONE_STEP = ("fast", "free")  # their steps are as long as the ball is wide, and nobody else's


def stages(
    pruner: Mapping[str, Any],
    pretrain: Sequence[_Stage],
    prune: _Stage,
    finetune: _Stage,
    objective: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Lay a method out: `pretrain`, `prune` and `finetune` are stages of a recipe whose pruners are not looked at.

    `objective` is the recipe's: a method that fine-tunes by a loss of its own takes the threat from it.
    """
    method = PRUNERS[pruner["name"]]
    dense = [{**stage, "pruner": "dense"} for stage in pretrain]
    if method.from_scratch:
        epochs = sum(stage["epochs"] for stage in (*pretrain, prune, finetune))
        like = {key: value for key, value in (pretrain[-1] if pretrain else prune).items() if key != "objective"}
        # Rates read off trained weights need them; the training then starts from random ones all the same.
        before = dense if pruner.get("strategy") in READS_WEIGHTS else []
        return [*before, {**like, "name": "train", "pruner": dict(pruner), "epochs": epochs}]
    passes = prune["epochs"] if method.passes is None else min(method.passes, prune["epochs"])
    last = {**finetune, "pruner": "fixed", "epochs": finetune["epochs"] + prune["epochs"] - passes}
    if method.finetuning and (objective or {}).get("name") != "natural":  # without an attack there is no such loss
        given = objective or {}
        shared = ("epsilon", "norm") if given.get("name") in ONE_STEP else _THREAT
        threat = {key: value for key, value in given.items() if key in shared}
        last["objective"] = {**threat, **method.finetuning}
    return [*dense, {**prune, "pruner": dict(pruner), "epochs": passes}, last]


class Parts(NamedTuple):
    """The three parts of a recipe that prunes a pre-trained network."""

    pretrain: list[_Stage]
    prune: _Stage
    finetune: _Stage

    def dense(self) -> list[dict[str, Any]]:
        """The stages of a network that is trained dense for all the epochs, at the pre-training's settings."""
        *earlier, last = self.pretrain or [self.prune]
        epochs = last["epochs"] + self.finetune["epochs"] + (self.prune["epochs"] if self.pretrain else 0)
        return [{**stage, "pruner": "dense"} for stage in (*earlier, {**last, "name": "train", "epochs": epochs})]


def parts(stages: Sequence[_Stage]) -> Parts:
    """Take a recipe's stages apart: dense ones, then one that prunes, then one that keeps its masks."""
    names = [stage["pruner"]["name"] for stage in stages]
    if len(names) < 2 or names[-1] != "fixed" or names[-2] in ("dense", "fixed") or {*names[:-2]} - {"dense"}:
        raise RecipeError(
            f"the stages' pruners are {', '.join(names)}: to compare methods they must be dense ones, one that prunes, "
            "and `fixed`, as in `fashion/harp-99`"
        )
    return Parts(list(stages[:-2]), stages[-2], stages[-1])
