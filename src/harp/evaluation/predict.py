"""Predictions of a network: its input format, its logits and its classes."""

import torch
from torch import Tensor, nn

from harp.attacks import logits
from harp.errors import DataError, ModelError
from harp.models.modes import evaluating
from harp.system.files import reason
from harp.system.numbers import brief


def example_of(model: nn.Module, images: Tensor) -> Tensor:
    """A tensor of the type and on the device that the model works with."""
    return next((p for p in model.parameters() if p.is_floating_point()), torch.zeros((), device=images.device))


def classes_of(model: nn.Module, images: Tensor, labels: Tensor, num_classes: int | None = None) -> int:
    """The number of classes, after a check that the model, the images and the labels fit together."""
    pair: tuple[object, object] = images, labels
    if not all(isinstance(part, Tensor) for part in pair):
        given = " and ".join(map(brief, pair))
        raise DataError(f"images and labels are {given}: give two tensors, like data.test.images and data.test.labels")
    if len(images) == 0:
        raise DataError("there are no images to evaluate on")
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise DataError(
            f"{len(images)} images need as many integer labels, not {tuple(labels.shape)} of {labels.dtype}"
        )
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise DataError(f"images must be bytes or floating point numbers in [0, 1], not {images.dtype}")
    first = as_input(images[:1], example_of(model, images))
    with torch.no_grad(), evaluating(model):
        try:
            width = logits(model, first).shape[1]
        except RuntimeError as error:
            shape = tuple(first.shape[1:])
            raise ModelError(f"the model can't take images of shape {shape} ({reason(error)})") from error
    classes = num_classes or width
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= min(classes, width):
        raise DataError(f"labels must be 0 to {min(classes, width) - 1}, these are {low} to {high}")
    return classes


def as_input(images: Tensor, like: Tensor) -> Tensor:
    """Images as the model takes them: on its device, of its type, bytes as numbers in [0, 1]."""
    x = images.to(like.device).to(like.dtype)
    return x / 255 if images.dtype == torch.uint8 else x


@torch.no_grad()
def predicted(model: nn.Module, x: Tensor) -> Tensor:
    """The classes that the model predicts; -1 where a logit is not finite, as its argmax means nothing then."""
    out = answer(model, x)
    return torch.where(out.isfinite().all(1), out.argmax(1), -1)


def predicted_in_batches(model: nn.Module, images: Tensor, batch: int) -> Tensor:
    """The classes that the model predicts for many images, on the CPU; -1 where a logit is not finite."""
    like, starts = example_of(model, images), range(0, len(images), batch)
    parts = [predicted(model, as_input(images[start : start + batch], like)).cpu() for start in starts]
    return torch.cat([torch.zeros(0, dtype=torch.long), *parts])


@torch.no_grad()
def answer(model: nn.Module, x: Tensor) -> Tensor:
    """The logits of the model in eval mode."""
    with evaluating(model):
        return logits(model, x)
