"""The stages of a method, laid out from the three parts of a recipe by one of two protocols.

`equal` gives every method the same epochs. A method that learns its masks prunes and fine-tunes a pre-trained network;
a one-shot method fine-tunes longer; one that trains sparse from random weights gets all epochs in one stage. The
learning rates are those of the stages that the epochs come from.

`paper` gives each method the lengths, learning rates, decays and schedules of its own paper: the `layout` of its class.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from harp.errors import RecipeError
from harp.pruning.allocation import READS_WEIGHTS
from harp.pruning.methods import PRUNERS, Layout, Phase
from harp.training import objectives

_Stage = Mapping[str, Any]
_Part = Mapping[str, Any]
_THREAT = ("epsilon", "step", "steps", "norm")
ONE_STEP = ("fast", "free")  # their step is as long as the ball is wide, unlike that of other objectives
PAPER_EPOCHS = 100  # of pre-training (and of fine-tuning) in HARP's paper: published lengths are relative to these


def stages(
    pruner: _Part, pretrain: Sequence[_Stage], prune: _Stage, finetune: _Stage, objective: _Part | None = None
) -> list[dict[str, Any]]:
    """The stages of a method by the protocol `equal`, from those of a recipe, whose pruners are ignored.

    `objective` is the recipe's: a method that fine-tunes under a loss of its own takes the threat from it.
    """
    method = PRUNERS[pruner["name"]]
    if method.from_scratch:
        return _from_scratch(pruner, pretrain, _whole(pretrain, prune, finetune, objective))
    passes = prune["epochs"] if method.passes is None else min(method.passes, prune["epochs"])
    longer = {**finetune, "epochs": finetune["epochs"] + prune["epochs"] - passes}
    return _in_three(pruner, pretrain, {**prune, "epochs": passes}, longer, objective)


def published(
    pruner: _Part, pretrain: Sequence[_Stage], prune: _Stage, finetune: _Stage, objective: _Part | None = None
) -> list[dict[str, Any]]:
    """The stages of a method by the protocol `paper`; what the paper does not say is as in `stages`.

    Published lengths are scaled by the recipe's pre-training, which has 100 epochs in HARP's paper (by its fine-tuning
    if it has none), and are at least one epoch.
    """
    method = PRUNERS[pruner["name"]]
    layout = method.layout
    scale = (_pretraining(pretrain, objective) if pretrain else finetune["epochs"]) / PAPER_EPOCHS
    if method.from_scratch:
        whole = _whole(pretrain, prune, finetune, objective)
        return _from_scratch(pruner, pretrain, _timed(whole, layout.prune, scale))
    first: Sequence[_Stage] = [*pretrain[:-1], *(_timed(stage, layout.pretrain, scale) for stage in pretrain[-1:])]
    second, third = _timed(prune, layout.prune, scale), _timed(finetune, layout.finetune, scale)
    if method.passes is not None:
        second["epochs"] = min(method.passes, second["epochs"])
    stepped = _stepped(layout, objective)
    if stepped is not None:
        first, (second, third) = _under(first, stepped), _under([second, third], stepped)
    return _in_three(pruner, first, second, third, stepped or objective)


def _in_three(
    pruner: _Part, pretrain: Sequence[_Stage], prune: _Stage, finetune: _Stage, objective: _Part | None
) -> list[dict[str, Any]]:
    """Pre-train, prune, fine-tune."""
    last = {**finetune, "pruner": "fixed"}
    own = PRUNERS[pruner["name"]].finetuning
    if own and (objective or {}).get("name") != "natural":  # such a loss needs an attack
        given = objective or {}
        shared = ("epsilon", "norm") if given.get("name") in ONE_STEP else _THREAT
        threat = {key: value for key, value in given.items() if key in shared}
        if "epsilon" not in threat:  # objectives differ in their defaults
            threat["epsilon"] = objectives.epsilon({"name": given.get("name", "pgd")})
        last["objective"] = {**threat, **own}
    return [*_dense(pretrain), {**prune, "pruner": dict(pruner)}, last]


def _from_scratch(pruner: _Part, pretrain: Sequence[_Stage], whole: _Stage) -> list[dict[str, Any]]:
    """One training from random weights; a strategy that reads trained weights needs the pre-training before it."""
    before = _dense(pretrain) if pruner.get("strategy") in READS_WEIGHTS else []
    return [*before, {**whole, "name": "train", "pruner": dict(pruner)}]


def _whole(pretrain: Sequence[_Stage], prune: _Stage, finetune: _Stage, objective: _Part | None) -> dict[str, Any]:
    """All epochs in one stage, with the settings of the pre-training."""
    like = {key: value for key, value in (pretrain[-1] if pretrain else prune).items() if key != "objective"}
    return {**like, "epochs": _pretraining(pretrain, objective) + prune["epochs"] + finetune["epochs"]}


def _pretraining(pretrain: Sequence[_Stage], objective: _Part | None) -> int:
    """The epochs of pre-training, without a natural warm-up before an adversarial one."""
    warm_up = [stage for stage in pretrain[:-1] if _name(stage.get("objective")) == "natural"]
    counted = pretrain if _name(objective) == "natural" else [stage for stage in pretrain if stage not in warm_up]
    return sum(stage["epochs"] for stage in counted)


def _name(part: str | _Part | None) -> str | None:
    return part if isinstance(part, str) or part is None else part.get("name")


def _dense(pretrain: Sequence[_Stage]) -> list[dict[str, Any]]:
    return [{**stage, "pruner": "dense"} for stage in pretrain]


def _timed(stage: _Stage, phase: Phase, scale: float) -> dict[str, Any]:
    """A stage with the length and the optimiser of a paper."""
    timed = dict(stage)
    if phase.epochs is not None:
        timed["epochs"] = max(1, round(phase.epochs * scale))
    if phase.optimizer():
        timed["optimizer"] = {**stage.get("optimizer", {}), **phase.optimizer()}
    return timed


def _stepped(layout: Layout, objective: _Part | None) -> dict[str, Any] | None:
    """The recipe's objective with the paper's step, if there is one and the attack has several steps."""
    given = {"name": "pgd", **(objective or {})}
    if layout.step is None or given["name"] in ONE_STEP:
        return None
    trained = objectives.made(given)
    if not isinstance(trained, objectives.AdversarialObjective):
        return None
    return {**given, "step": float(f"{layout.step * trained.epsilon:.6g}")}


def _under(stages: Sequence[_Stage], objective: _Part) -> list[dict[str, Any]]:
    """Stages under an objective, except those that have their own."""
    return [{"objective": dict(objective), **stage} for stage in stages]


def check_learns(label: str, name: str, stages: Sequence[_Stage]) -> None:
    """Raise an error if a method that learns its masks has no epochs for it."""
    method = PRUNERS[name]
    if not method.from_scratch and method.passes is None and not stages[-2]["epochs"]:
        raise RecipeError(f"{label} learns what to prune, but the recipe's stage for that has 0 epochs")


class Protocol(NamedTuple):
    """A layout of the stages of methods."""

    meaning: str
    stages: Callable[..., list[dict[str, Any]]]


PROTOCOLS = {
    "equal": Protocol("every method trains for the same epochs, at the recipe's learning rates", stages),
    "paper": Protocol(
        "every method has the lengths, learning rates, decays and schedules of its own paper; lengths are scaled by "
        f"the recipe's pre-training, {PAPER_EPOCHS} epochs in HARP's paper",
        published,
    ),
}


class Parts(NamedTuple):
    """The three parts of a recipe that prunes a pre-trained network."""

    pretrain: list[_Stage]
    prune: _Stage
    finetune: _Stage

    def dense(self) -> list[dict[str, Any]]:
        """The stages of a dense network that is trained for all epochs, with the settings of the pre-training."""
        *earlier, last = self.pretrain or [self.prune]
        epochs = last["epochs"] + self.finetune["epochs"] + (self.prune["epochs"] if self.pretrain else 0)
        return [{**stage, "pruner": "dense"} for stage in (*earlier, {**last, "name": "train", "epochs": epochs})]


def parts(stages: Sequence[_Stage]) -> Parts:
    """Split a recipe's stages: dense ones, then one that prunes, then one that keeps its masks."""
    names = [stage["pruner"]["name"] for stage in stages]
    if len(names) < 2 or names[-1] != "fixed" or names[-2] in ("dense", "fixed") or {*names[:-2]} - {"dense"}:
        raise RecipeError(
            f"the stages' pruners are {', '.join(names)}: for other methods they must be dense ones, one that prunes, "
            "and `fixed`, as in `fashion`"
        )
    return Parts(list(stages[:-2]), stages[-2], stages[-1])
