"""Masks: which weights live. A mask is a boolean tensor, and `Masks` maps a parameter's name to its mask."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from harp.errors import CheckpointError, ModelError
from harp.system.numbers import brief
from harp.system.tensors import load_tensors, save_tensors

Masks = dict[str, Tensor]


def top_k(scores: Tensor, k: int) -> Tensor:
    """Mark exactly `k` largest entries; among equal scores the ones that come first.

    Selection instead of sorting: `numpy.partition` finds the threshold of 15 million scores some 25 times faster
    than `torch.sort` (and 4 times faster than `torch.topk`), which is what lets masks follow every step.
    """
    flat = scores.detach().reshape(-1)
    if not 0 <= k <= flat.numel():
        raise ValueError(f"can't keep {k} of {flat.numel()} entries")
    if k == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    threshold = _kth_largest(flat, k)
    mask = flat >= threshold
    surplus = int(mask.count_nonzero()) - k
    if surplus < 0:
        raise ModelError("scores hold NaN: the training has diverged or the weights are damaged")
    if surplus:
        ties = (flat == threshold).nonzero().reshape(-1)
        mask[ties[len(ties) - surplus :]] = False
    return mask.view(scores.shape)


def at_random(where: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Mark exactly `k` of the entries that `where` allows, each set of k as likely as any other."""
    allowed = where.detach().reshape(-1).nonzero().reshape(-1).cpu()
    if not 0 <= k <= len(allowed):
        raise ValueError(f"can't draw {k} of {len(allowed)} entries")
    mask = torch.zeros(where.numel(), dtype=torch.bool)
    mask[allowed[torch.randperm(len(allowed), generator=generator)[:k]]] = True
    return mask.view(where.shape).to(where.device)


def _kth_largest(flat: Tensor, k: int) -> float | Tensor:
    if flat.device.type != "cpu":
        return torch.kthvalue(flat, flat.numel() - k + 1).values
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()  # numpy knows no bfloat16; the order is the same
    return float(np.partition(flat.numpy(), flat.numel() - k)[flat.numel() - k])


def kept(masks: Mapping[str, Tensor]) -> int:
    """How many weights live."""
    return sum(int(mask.count_nonzero()) for mask in masks.values())


def density(masks: Mapping[str, Tensor]) -> float:
    """The share of weights that live."""
    return kept(masks) / sum(mask.numel() for mask in masks.values())


@torch.no_grad()
def apply(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set every weight outside its mask to zero.

    Arguments:
        model: its parameters are changed in place.
        masks: by parameter; what has none is left alone.

    Example:
        harp.apply_masks(model, harp.Magnitude(harp.Weights(model), keep=0.1).masks())
    """
    check_shapes(model, masks)
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        weight.masked_fill_(~mask.to(weight.device), 0.0)


def check_shapes(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Refuse masks that are not of this model's parameters."""
    check_mapping(masks)
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            raise ModelError(f"no weight of shape {tuple(mask.shape)} called {name!r}: masks of another model?")


def check_mapping(masks: object) -> None:
    """Refuse what is no dict of masks."""
    if not isinstance(masks, Mapping):
        raise ModelError(f"masks {brief(masks)}: give a dict by parameter, like `pruner.masks()` or `fitted.masks`")


def save(path: str | Path, masks: Mapping[str, Tensor]) -> None:
    """Write masks at one bit a weight.

    Arguments:
        path: the file.
        masks: by parameter.

    Example:
        harp.save_masks(folder / "masks.safetensors", harp.Magnitude(units, keep=0.1).masks())
    """
    check_mapping(masks)
    packed = {name: torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))) for name, mask in masks.items()}
    shapes = {name: ",".join(map(str, mask.shape)) for name, mask in masks.items()}
    save_tensors(path, packed, shapes)


def load(path: str | Path) -> Masks:
    """Read what `save` wrote.

    Arguments:
        path: the file.

    Example:
        harp.save_masks(folder / "masks.safetensors", harp.Magnitude(units, keep=0.1).masks())
        masks = harp.load_masks(folder / "masks.safetensors")
    """
    packed, shapes = load_tensors(path)
    masks = {}
    for name, bits in packed.items():
        try:
            shape = [int(size) for size in shapes[name].split(",")]
            flags = np.unpackbits(bits.numpy(), count=int(np.prod(shape)))
            masks[name] = torch.from_numpy(flags.astype(bool)).view(shape)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path} is no file of masks: {name!r} has no usable shape") from error
    return masks
