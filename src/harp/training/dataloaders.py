"""Anybody's batches as a function of the epoch: after an interruption they come as if there had been none."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from harp.errors import RecipeError
from harp.seeds import derive


class EpochBatches(Protocol):
    """Batches as a function of the epoch: `harp.batches.Batches`, or your own."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int, start: int = 0) -> Iterable[tuple[Tensor, Tensor]]:
        """The batches of an epoch from number `start` on."""
        ...


def by_epoch(batches: Any, fabric: Any, seed: int) -> EpochBatches:
    """Batches as a function of the epoch, and this rank's part of them."""
    if callable(batches):
        shard = getattr(batches, "shard", None)
        mine: EpochBatches = shard(fabric.global_rank, fabric.world_size) if shard else batches
        return mine
    if fabric.world_size == 1:
        return _Loader(batches, seed)
    # The engine's wrapper counts the epochs of this process, which may have been resumed: not of the training.
    return _Loader(fabric.setup_dataloaders(batches, move_to_device=False)._dataloader, seed)


class _Loader:
    """Any iterable of batches as batches by epoch; earlier batches are drawn and dropped on resume."""

    def __init__(self, loader: Iterable[tuple[Tensor, Tensor]], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def __len__(self) -> int:
        try:
            return len(self.loader)  # type: ignore[arg-type]  # some iterables have no length
        except TypeError as error:
            raise RecipeError("batches have no length: pass a DataLoader, or `harp.batches.Batches`") from error

    def __call__(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = derive(self.seed, "order", epoch)
        for sampler in _samplers(self.loader):
            # To torch's own the epoch is nothing but a part of its seed, and it knows no other one.
            sampler.set_epoch(order if type(sampler) is DistributedSampler else epoch)
        torch.manual_seed(order)
        iterator = iter(self.loader)
        for number in range(len(self)):
            torch.manual_seed(derive(self.seed, "load", epoch, number))  # as if the batches before had been trained on
            x, y = next(iterator)
            if number >= start:
                yield x, y


def _samplers(loader: Any) -> list[Any]:
    """What decides a loader's order and wants to know the epoch."""
    batches = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    return [each for each in {id(each): each for each in found}.values() if hasattr(each, "set_epoch")]
