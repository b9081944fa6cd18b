"""An optimiser that somebody else made, which steps what a pruner learns until it is given back."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from harp.errors import CheckpointError, ModelError, RecipeError
from harp.system.numbers import brief

if TYPE_CHECKING:
    from harp.pruning.methods.base import ParameterGroup

_TAKEN = "_harp_taken"  # an attribute of the optimiser
_STATE = "pruner"  # a key of the optimiser's state
_SCHEDULED = "initial_lr"  # what torch's learning-rate schedules add to every group


class Takeover:
    """Replaces the parameters of a model in an optimiser by what a pruner trains.

    A parameter that stays keeps the settings of its group, such as a weight decay of its own; what is new gets those of
    the first group. Parameters of other models stay where they are.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence["ParameterGroup"], model: nn.Module) -> None:
        self.optimizer = optimizer
        self.before = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        self.origins: list[int] = []  # for each new group, the number of the old one that its settings are from
        self.handles: list[RemovableHandle] = []
        owned = {id(parameter) for parameter in model.parameters()}
        numbers = {id(p): number for number, group in enumerate(self.before) for p in group["params"]}
        new: list[dict[str, Any]] = []
        for group in groups:
            parts: dict[int, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                parts.setdefault(numbers.get(id(parameter), 0), []).append(parameter)
            for number, part in parts.items():
                new.append({**self.before[number], **group, "params": part})
                self.origins.append(number)
        for number, group in enumerate(self.before):
            others = [parameter for parameter in group["params"] if id(parameter) not in owned]
            if others:
                new.append({**group, "params": others})
                self.origins.append(number)
        if len(new) != len(self.before) and any(_SCHEDULED in group for group in self.before):
            raise RecipeError(
                f"a learning-rate schedule was made for the {len(self.before)} parameter groups of this optimiser, and "
                f"the pruner makes {len(new)}: attach the pruner first, then make the schedule"
            )
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in owned]:
            del optimizer.state[parameter]
        self._replace(new)
        setattr(optimizer, _TAKEN, self)

    def give_back(self, *, scheduled: bool) -> None:
        """Let the optimiser step the model's own parameters again.

        With `scheduled` the settings are the current ones, as a schedule left them; else those of before.
        """
        for handle in self.handles:
            handle.remove()
        groups = [dict(group) for group in self.before]
        for number, group in enumerate(groups if scheduled else ()):
            if number in self.origins:
                current = self.optimizer.param_groups[self.origins.index(number)]
                group.update({key: value for key, value in current.items() if key != "params"})
        kept = {id(parameter) for group in groups for parameter in group["params"]}
        for parameter in [parameter for parameter in self.optimizer.state if id(parameter) not in kept]:
            del self.optimizer.state[parameter]
        self._replace(groups)
        delattr(self.optimizer, _TAKEN)

    def _replace(self, groups: Sequence[dict[str, Any]]) -> None:
        self.optimizer.param_groups.clear()
        for group in groups:
            self.optimizer.add_param_group(group)

    def within_its_state(self, state: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        """Keep the state of the pruner within the optimiser's, so that whoever saves the latter saves both."""

        def save(_: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
            return {**whole, _STATE: state()}

        def restore(_: Optimizer, whole: dict[str, Any]) -> None:
            if _STATE not in whole:
                raise CheckpointError(
                    "the optimiser's state holds no pruner: it was saved before one was attached, or after its finish()"
                )
            load(whole[_STATE])

        self.handles.append(self.optimizer.register_state_dict_post_hook(save))
        self.handles.append(self.optimizer.register_load_state_dict_pre_hook(restore))

    def after_steps(self, after_step: Callable[[], None]) -> None:
        """Call this after each step."""
        self.handles.append(self.optimizer.register_step_post_hook(lambda *_: after_step()))

    def around_steps(self, after_backward: Callable[[], None], after_step: Callable[[], None]) -> None:
        """Call these between the backward pass and the step, and after the step."""

        def before(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            itself, *rest = arguments
            closure = options.get("closure", rest[0] if rest else None)
            if closure is None:
                after_backward()
                return None

            def whole() -> Any:  # the closure makes the backward pass
                with torch.enable_grad():
                    loss = closure()
                after_backward()
                return loss

            return (itself,), {**options, "closure": whole}

        self.handles.append(self.optimizer.register_step_pre_hook(before))
        self.after_steps(after_step)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse an optimiser that can't step what a pruner of a model learns."""
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(f"optimizer {brief(optimizer)}: give one, like torch.optim.SGD(model.parameters(), lr=0.1)")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RecipeError("LBFGS moves weights several times in a step, and masks can't follow: take SGD or Adam")
    if getattr(optimizer, _TAKEN, None) is not None:
        raise RecipeError("a pruner is attached to this optimiser already: call its finish() first")
    owned = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in owned for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            f"the optimiser steps no parameter of the {type(model).__name__} that is pruned: make it with the "
            "parameters() of this model"
        )
