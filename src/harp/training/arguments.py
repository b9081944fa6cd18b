"""What `harp.fit` is given: refused in one line before anything is trained, or turned into what was meant."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harp.attacks import check_number
from harp.errors import DataError, ModelError, RecipeError
from harp.pruning.methods import Pruner
from harp.system.numbers import brief


def check_pruner(pruner: Any, model: Any) -> None:
    """Refuse what is no pruner, and a pruner of another model."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {brief(model)}: give an nn.Module, such as harp.build_model(...) makes")
    if not isinstance(pruner, Pruner):
        raise RecipeError(f"pruner {brief(pruner)}: give one, like harp.Harp(model, keep=0.01) or harp.Dense(model)")
    if all(module is not pruner.units.model for module in model.modules()):
        raise ModelError(
            f"the {type(pruner).__name__} was made for another {type(pruner.units.model).__name__} than the model that "
            "is trained: make it for this one"
        )


def check_length(epochs: Any, accumulate: Any) -> None:
    """Refuse a training of half an epoch."""
    check_number("epochs", epochs, whole=True)
    check_number("accumulate", accumulate, whole=True, least=1)


def check_rates(lr: Any, momentum: Any, weight_decay: Any) -> None:
    """Refuse settings of the optimiser that are no numbers."""
    for name, value in {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}.items():
        check_number(name, value)


def check_validation(validate: Any, select: str | None) -> None:
    """Refuse a validation that can't be called, and a metric that nobody measures."""
    if validate is not None and not callable(validate) and not isinstance(validate, Iterable):
        raise RecipeError(
            f"validate {brief(validate)}: give held-out batches, or a function that returns metrics by their names"
        )
    if select is not None and validate is None:
        raise RecipeError(f"select {select!r}: nothing measures it, so give `validate` too")


def metrics_of(measured: Any) -> dict[str, float]:
    """What a validation returned."""
    if not isinstance(measured, Mapping):
        raise RecipeError(f"validate returned {brief(measured)}: it must return metrics by their names, in a dict")
    return dict(measured)


def check_batches(batches: Any) -> None:
    """Refuse what gives single examples, or no batches at all."""
    advice = "give harp.Batches(data.train, 64), a DataLoader, or a list of pairs (images, labels)"
    if callable(batches):
        return
    if isinstance(batches, (Tensor, Dataset, Mapping, str)) or not isinstance(batches, Iterable):
        raise RecipeError(f"batches of type {type(batches).__name__}: {advice}")
    if isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(part, Tensor) for part in batches):
        raise RecipeError(f"batches are one pair of tensors: {advice}")


def check_count(count: int, epochs: int) -> None:
    """Refuse a training on nothing."""
    if epochs and not count:
        raise DataError(
            "batches are empty: there is nothing to train on (a DataLoader drops its last batch on request)"
        )


def check_trained(groups: Iterable[Mapping[str, Any]], frozen: bool) -> None:
    """Refuse a training of a frozen model in which nothing can change."""
    if frozen and not any(len(list(group["params"])) for group in groups):
        raise ModelError("all parameters of the model are frozen: set requires_grad of those that are to be trained")


def as_images(x: Any, y: Any, model: nn.Module) -> tuple[Any, Any]:
    """A batch of images and labels as a network takes them: bytes as numbers in [0, 1], numbers of its type."""
    x, y = (part if isinstance(part, Tensor) else _tensor(part) for part in (x, y))
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is not None:
        x, y = x.to(like.device), y.to(like.device)
    if x.dtype == torch.uint8:
        x = x.float() / 255
    if x.is_floating_point() and like is not None and x.dtype != like.dtype and x.dtype in _WIDTHS:
        x = x.to(like.dtype)
    return x, y.long() if y.dtype in _INTEGERS else y


def called(optimizer: Any) -> Callable[[list[dict[str, Any]]], Any]:
    """The function that makes the optimiser."""
    if not callable(optimizer):
        raise RecipeError(
            f"optimizer {brief(optimizer)}: give a torch optimiser, or a function of its parameter groups"
        )
    made: Callable[[list[dict[str, Any]]], Any] = optimizer
    return made


_WIDTHS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def _tensor(part: Any) -> Tensor:
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"a batch holds {brief(part)}: give images and labels, or an objective of your own (harp.Objective)"
        ) from error
