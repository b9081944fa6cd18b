"""The interface of an objective, which is what a training minimises. The objectives are in `objectives.py`."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Attack, images_in_box, logits
from harp.errors import DataError, HarpError, ModelError
from harp.models.inputs import described
from harp.models.modes import Logits, evaluating
from harp.pruning.methods import Loss
from harp.pruning.papers import Paper
from harp.system.files import reason
from harp.system.numbers import brief


class Objective(ABC):
    """What a training minimises. Only the call is required; each of the other members does nothing by default.

    `harp.fit` also takes a plain function `(model, x, y, forward=None) -> loss`. An objective that keeps something from
    step to step, sees a batch several times or acts after the backward pass derives from this class, and so does one
    whose batches are not pairs: `split` says what the model is called with. Inputs and targets may be anything, also
    nested tuples and dicts; their tensors are on the model's device.

    Example:
        class Smoothed(harp.Objective):
            def __call__(self, model, x, y, forward=None):
                return torch.nn.functional.cross_entropy((forward or model)(x), y, label_smoothing=0.1)

        class Ratings(harp.Objective):
            def split(self, batch):
                return {"user": batch["user"], "film": batch["film"]}, batch["stars"]

            def __call__(self, model, x, y, forward=None):
                return torch.nn.functional.mse_loss((forward or model)(**x), y)
    """

    # The description of the objective, for cards and submissions.
    title: ClassVar[str | None] = None
    paper: ClassVar[Paper | None] = None
    taxonomy: ClassVar[str | None] = None  # its name in the Adversarial Pruning Benchmark

    replays: int = 1  # optimiser steps on each batch

    # What is kept from step to step with one row for each image of this process's batch. It is part of a checkpoint,
    # where the rows of all processes are joined.
    noise: Tensor | None = None

    @abstractmethod
    def __call__(self, model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
        """The loss of a batch; the pass that it is computed by calls `forward`, the model if that is None."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The inputs and the targets of a batch as the loader gives it: a pair as it is, anything else is all input.

        The model must run on the inputs: on a tensor, on the entries of a tuple, or on those of a dict by their names.
        Methods that follow the ways through the model take their example from here.
        """
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        return batch, None

    def check(self, model: nn.Module, x: Any, y: Any) -> None:  # noqa: B027  # a hook
        """Refuse the first batch of a training if it can't be right."""

    def measure(self, model: nn.Module, x: Any, y: Any) -> Mapping[str, float]:
        """What is measured on a batch of held-out data, in eval mode; nothing by default."""
        return {}

    def begin(self) -> "Objective":
        """The objective of one training, called once at its start: a new one if it keeps something."""
        return self

    def start_epoch(self) -> None:  # noqa: B027  # a hook
        """Called before the first step of each epoch, but not when an epoch is resumed."""

    def after_backward(self) -> None:  # noqa: B027  # a hook
        """Called once in every optimiser step, after the gradients of the whole batch are computed."""

    def state(self) -> dict[str, Any]:
        """What else a checkpoint must hold: tensors and plain values, the same in every process."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # a hook
        """Load what `state` returned."""

    def judge(self) -> Attack | None:
        """The attack that held-out images are validated with; None: they are validated without one."""
        return None


class AttackingObjective(Objective):
    """An objective of image classification in two parts, the attack and the loss.

    Methods that need several losses at one batch attack once.
    """

    @abstractmethod
    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images that the loss is computed at."""

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The loss at images and their attacked versions: the cross entropy at the latter."""
        return F.cross_entropy(forward(x_adv), y)

    def check(self, model: nn.Module, x: Any, y: Any) -> None:
        """Refuse an empty batch, images outside [0, 1] and labels without a logit."""
        images_in_box(x, y)
        if not len(x) or y.dtype == torch.bool:
            raise DataError(f"{len(x)} images with labels of {y.dtype}, expected at least one image and integer labels")
        images = x[:1].clone()
        with evaluating(model):
            try:
                classes = logits(model, images).shape[-1]
            except HarpError:
                raise
            except Exception as error:  # forward may do anything
                raise ModelError(f"the model can't run on images of {described(x[:1])}: {reason(error)}") from error
        if not torch.equal(images, x[:1]):
            raise ModelError(
                "the model overwrites its images, so they can't be attacked: let forward begin with x.clone()"
            )
        wrong = y[(y < 0) | (y >= classes)]
        if len(wrong):
            raise DataError(f"label {int(wrong[0])}, expected 0 to {classes - 1}: the model has {classes} outputs")

    def measure(self, model: nn.Module, x: Any, y: Any) -> Mapping[str, float]:
        """The share of images that are classified correctly: as they are, and under the attack of `judge`."""
        attack = self.judge()
        found = {"natural": float((logits(model, x).argmax(1) == y).float().mean())}
        if attack is not None:
            found["robust"] = float((logits(model, attack(model, x, y)).argmax(1) == y).float().mean())
        return found

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """Attack a batch and compute its loss."""
        return self.loss(forward or model, x, self.attack(model, x, y), y)


class PlainObjective(Objective):
    """A function as an objective."""

    def __init__(self, function: Loss) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"PlainObjective({brief(self.function)})"

    def __call__(self, model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
        """The function's loss."""
        return self.function(model, x, y, forward=forward)


def as_objective(loss: Objective | Loss) -> Objective:
    """The objective itself, or a function as an objective."""
    if isinstance(loss, Objective):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise ModelError(f"objective {brief(loss)}: give one, like harp.PgdTraining(), or a function of yours")
    known = ("begin", "replays", "split", "measure", "start_epoch", "after_backward", "noise")
    hooks = [name for name in known if hasattr(loss, name)]
    if hooks:  # they would be ignored
        raise ModelError(f"{type(loss).__name__} has {hooks[0]!r}, so it must be derived from harp.Objective")
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None, None, None, forward=None)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"objective {brief(loss)} can't be called as (model, x, y, forward=None) -> loss: that is what a training "
            "minimises, like harp.PgdTraining()"
        ) from error
    return PlainObjective(loss)
