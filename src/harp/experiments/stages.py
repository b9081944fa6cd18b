"""The stages of a method, laid out from the three parts of a recipe by a protocol.

`given` takes the lengths as they are given. A one-shot method prunes at once, so its epochs of pruning are not spent;
one that trains sparse from random weights gets all epochs in one stage.

`equal` gives every method the same epochs. A method that learns its masks prunes and fine-tunes a pre-trained network;
a one-shot method fine-tunes longer. The learning rates are those of the stages that the epochs come from.

`paper` gives each method the lengths, learning rates, decays and schedules of its own paper: the `layout` of its class.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from harp.errors import RecipeError
from harp.pruning.allocation import READS_WEIGHTS
from harp.pruning.methods import PRUNERS, Layout, Phase
from harp.training import objectives
from harp.training.free_at import FreeTraining

Part = Mapping[str, Any]  # of a recipe: a stage, a pruner or an objective
Stages = list[dict[str, Any]]
ONE_STEP = ("fast", "free")  # their step is as long as the ball is wide, unlike that of other objectives
PAPER_EPOCHS = 100  # of pre-training (and of fine-tuning) in HARP's paper: published lengths are relative to these


class Parts(NamedTuple):
    """The three parts of a recipe that prunes a pre-trained network; their pruners are ignored."""

    pretrain: Sequence[Part]
    prune: Part
    finetune: Part

    def given(self, pruner: Part, objective: Part | None = None) -> Stages:
        """The stages of a method by the protocol `given`; `objective` is as in `equal`."""
        method, pruning = PRUNERS[pruner["name"]], self.prune["epochs"]
        if method.from_scratch:
            return self._from_scratch(pruner, self._whole(objective))
        passes = pruning if method.passes is None else min(method.passes, pruning)
        return Parts(self.pretrain, {**self.prune, "epochs": passes}, self.finetune)._in_three(pruner, objective)

    def equal(self, pruner: Part, objective: Part | None = None) -> Stages:
        """The stages of a method by the protocol `equal`.

        `objective` is the recipe's: a method that fine-tunes under a loss of its own takes the threat from it.
        """
        passes, pruning = PRUNERS[pruner["name"]].passes, self.prune["epochs"]
        saved = 0 if passes is None else pruning - min(passes, pruning)
        longer = {**self.finetune, "epochs": self.finetune["epochs"] + saved}
        return (self if PRUNERS[pruner["name"]].from_scratch else self._replace(finetune=longer)).given(
            pruner, objective
        )

    def published(self, pruner: Part, objective: Part | None = None) -> Stages:
        """The stages of a method by the protocol `paper`; what the paper does not say is as in `equal`.

        Published lengths are scaled by the recipe's pre-training, which has 100 epochs in HARP's paper (by its
        fine-tuning if it has none), and are at least one epoch.
        """
        method = PRUNERS[pruner["name"]]
        layout = method.layout
        scale = (self._pretraining(objective) if self.pretrain else self.finetune["epochs"]) / PAPER_EPOCHS
        if method.from_scratch:
            return self._from_scratch(pruner, _timed(self._whole(objective), layout.prune, scale))
        first = [dict(stage) for stage in self.pretrain]
        first[-1:] = [_timed(stage, layout.pretrain, scale) for stage in first[-1:]]
        second, third = _timed(self.prune, layout.prune, scale), _timed(self.finetune, layout.finetune, scale)
        if method.passes is not None:
            second["epochs"] = min(method.passes, second["epochs"])
        stepped = _stepped(layout, objective)
        if stepped is not None:  # stages with an objective of their own keep it
            *first, second, third = [{"objective": dict(stepped), **stage} for stage in [*first, second, third]]
        return Parts(first, second, third)._in_three(pruner, stepped or objective)

    def dense(self) -> Stages:
        """The stages of a dense network that is trained for all epochs, with the settings of the pre-training."""
        *earlier, last = self.pretrain or [self.prune]
        epochs = last["epochs"] + self.finetune["epochs"] + (self.prune["epochs"] if self.pretrain else 0)
        return _dense([*earlier, {**last, "name": "train", "epochs": epochs}])

    def replayed(self, own_loss: bool) -> "Parts":
        """The parts at the lengths of Free-AT, which replays each epoch several times.

        Stages with an objective of their own stay as they are, and so does fine-tuning under the method's own loss.
        """

        def shorter(stage: Part) -> Part:
            epochs = math.ceil(stage["epochs"] / FreeTraining.replays)
            return stage if "objective" in stage else {**stage, "epochs": epochs}

        finetune = self.finetune if own_loss else shorter(self.finetune)
        return Parts([shorter(stage) for stage in self.pretrain], shorter(self.prune), finetune)

    def _in_three(self, pruner: Part, objective: Part | None) -> Stages:
        """Pre-train, prune, fine-tune."""
        last, given = {**self.finetune, "pruner": "fixed"}, objective or {}
        own = PRUNERS[pruner["name"]].finetuning
        if own and given.get("name") != "natural":  # such a loss needs an attack
            shared = ("epsilon", "norm") if given.get("name") in ONE_STEP else ("epsilon", "step", "steps", "norm")
            threat = {key: value for key, value in given.items() if key in shared}
            if "epsilon" not in threat:  # objectives differ in their defaults
                threat["epsilon"] = objectives.epsilon({"name": given.get("name", "pgd")})
            last["objective"] = {**threat, **own}
        return [*_dense(self.pretrain), {**self.prune, "pruner": dict(pruner)}, last]

    def _from_scratch(self, pruner: Part, whole: Part) -> Stages:
        """One training from random weights; a strategy that reads trained weights needs the pre-training before it."""
        before = _dense(self.pretrain) if pruner.get("strategy") in READS_WEIGHTS else []
        return [*before, {**whole, "name": "train", "pruner": dict(pruner)}]

    def _whole(self, objective: Part | None) -> dict[str, Any]:
        """All epochs in one stage, with the settings of the pre-training."""
        like = self.pretrain[-1] if self.pretrain else self.prune
        epochs = self._pretraining(objective) + self.prune["epochs"] + self.finetune["epochs"]
        return {**{key: value for key, value in like.items() if key != "objective"}, "epochs": epochs}

    def _pretraining(self, objective: Part | None) -> int:
        """The epochs of pre-training, without a natural warm-up before an adversarial one."""
        warm_up = [stage for stage in self.pretrain[:-1] if _name(stage.get("objective")) == "natural"]
        is_natural = _name(objective) == "natural"
        return sum(stage["epochs"] for stage in self.pretrain if is_natural or stage not in warm_up)


def parts(stages: Sequence[Part]) -> Parts:
    """Split a recipe's stages: dense ones, then one that prunes, then one that keeps its masks."""
    names = [stage["pruner"]["name"] for stage in stages]
    if len(names) < 2 or names[-1] != "fixed" or names[-2] in ("dense", "fixed") or {*names[:-2]} - {"dense"}:
        raise RecipeError(
            f"the stages' pruners are {', '.join(names)}: for other methods they must be dense ones, one that prunes, "
            "and `fixed`, as in `fashion`"
        )
    return Parts(list(stages[:-2]), stages[-2], stages[-1])


def _name(part: str | Part | None) -> str | None:
    return part if isinstance(part, str) or part is None else part.get("name")


def _dense(stages: Sequence[Part]) -> Stages:
    return [{**stage, "pruner": "dense"} for stage in stages]


def _timed(stage: Part, phase: Phase, scale: float) -> dict[str, Any]:
    """A stage with the length and the optimiser of a paper."""
    timed = dict(stage)
    if phase.epochs is not None:
        timed["epochs"] = max(1, round(phase.epochs * scale))
    if phase.optimizer():
        timed["optimizer"] = {**stage.get("optimizer", {}), **phase.optimizer()}
    return timed


def _stepped(layout: Layout, objective: Part | None) -> dict[str, Any] | None:
    """The recipe's objective with the paper's step, if there is one and the attack has several steps."""
    given = {"name": "pgd", **(objective or {})}
    if layout.step is None or given["name"] in ONE_STEP:
        return None
    trained = objectives.made(given)
    if not isinstance(trained, objectives.AdversarialObjective):
        return None
    return {**given, "step": float(f"{layout.step * trained.epsilon:.6g}")}


def check_learns(label: str, name: str, stages: Sequence[Part]) -> None:
    """Raise an error if a method that learns its masks has no epochs for it."""
    method = PRUNERS[name]
    if not method.from_scratch and method.passes is None and not stages[-2]["epochs"]:
        raise RecipeError(f"{label} learns what to prune, but the recipe's stage for that has 0 epochs")


class Protocol(NamedTuple):
    """A layout of the stages of methods."""

    meaning: str
    stages: Callable[[Parts, Part, Part | None], Stages]


def protocol_of(name: str) -> Protocol:
    """The protocol of a name."""
    if name not in PROTOCOLS:
        raise RecipeError(f"unknown protocol {name!r}: one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


PROTOCOLS = {
    "given": Protocol(
        "every stage has the epochs that are given; what one-shot methods don't need for pruning is not spent",
        Parts.given,
    ),
    "equal": Protocol("every method trains for the same epochs, at the recipe's learning rates", Parts.equal),
    "paper": Protocol(
        "every method has the lengths, learning rates, decays and schedules of its own paper; lengths are scaled by "
        f"the recipe's pre-training, {PAPER_EPOCHS} epochs in HARP's paper",
        Parts.published,
    ),
}
