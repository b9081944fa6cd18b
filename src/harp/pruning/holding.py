"""Masks that hold: pruned weights stay zero in any further training, until the masks are lifted.

A finished pruner leaves an ordinary model: its parameters have their usual names, and nothing in it says which of them
are pruned. The next step of any optimiser would move them: by their gradients, by the momentum of an earlier training.
So masks that hold are applied around the steps of every torch optimiser that has one of the weights: gradients outside
the masks are zero before the step, weights are zero after it. Another optimiser than the one of the pruning is no way
around them, nor is a deep copy of the model.

The masks are an attribute of the model that holds them, so they are copied with it. They are no buffers, so
`state_dict` does not have them; a pickle of the model leaves them out, so that it loads where HARP is not installed.
"""

import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harp.pruning.masks import Masks, apply, check_shapes

_NAME = "_harp_masks"  # of the attribute


class _Held:
    """The masks of a model. It is dropped with the model."""

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        self.model, self.masks = weakref.ref(model), masks
        _HELD.add(self)

    def weights(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The masked weights that an optimiser steps, and their masks."""
        model = self.model()
        if model is None or getattr(model, _NAME, None) is not self:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = dict(model.named_parameters())
        for name, mask in self.masks.items():
            weight = parameters.get(name)
            # A weight whose channels were cut is another one.
            if weight is not None and id(weight) in stepped and weight.shape == mask.shape:
                if mask.device != weight.device:
                    self.masks[name] = mask = mask.to(weight.device)
                yield weight, mask

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Held | None":
        model = memo.get(id(self.model()))
        return _Held(model, {name: mask.clone() for name, mask in self.masks.items()}) if model is not None else None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()


_HELD: "weakref.WeakSet[_Held]" = weakref.WeakSet()


def hold(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set every weight outside its mask to zero, and keep it there in any training until `harp.lift_masks`.

    A pruner's `finish` does this. Do it for a model whose weights were read from a file before you train it on.

    Arguments:
        model: its parameters are changed in place.
        masks: by parameter; what has none is left alone.

    Example:
        harp.hold_masks(model, harp.Magnitude(model, keep=0.1).masks())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()  # the pruned weights are still zero
    """
    check_shapes(model, masks)
    apply(model, masks)
    own = {name: mask.detach().clone() for name, mask in masks.items() if not mask.all()}
    lift(model)
    if own:
        _watch_all_optimizers()
        setattr(model, _NAME, _Held(model, own))


def lift(model: nn.Module) -> None:
    """Let further training move all weights of a model again, the pruned ones too.

    Arguments:
        model: of `harp.hold_masks`, or of a finished pruner.

    Example:
        harp.Magnitude(model, keep=0.1).finish()
        harp.lift_masks(model)
    """
    for module in model.modules():
        if getattr(module, _NAME, None) is not None:
            delattr(module, _NAME)


@torch.no_grad()
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for held in list(_HELD):
        for weight, mask in held.weights(optimizer):
            if weight.grad is not None and not weight.grad.is_sparse:
                weight.grad.masked_fill_(~mask, 0.0)


@torch.no_grad()
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for held in list(_HELD):
        for weight, mask in held.weights(optimizer):
            weight.masked_fill_(~mask, 0.0)


@cache
def _watch_all_optimizers() -> None:
    """Call the two functions around the steps of every optimiser from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
