"""Batches of any kind as a function of the epoch, so that a resumed training sees the same batches."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DistributedSampler

from harp.errors import RecipeError
from harp.system.seeds import derive


class EpochBatches(Protocol):
    """Batches as a function of the epoch: `harp.data.batches.Batches`, or your own."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int, start: int = 0) -> Iterable[Any]:
        """The batches of an epoch from number `start` on."""
        ...


def by_epoch(batches: Any, fabric: Any, seed: int) -> EpochBatches:
    """This rank's part of the batches, as a function of the epoch."""
    if callable(batches):
        shard = getattr(batches, "shard", None)
        own: EpochBatches = shard(fabric.global_rank, fabric.world_size) if shard else batches
        return own
    if fabric.world_size == 1:
        return _Loader(batches, seed)
    # Fabric's wrapper counts the epochs of this process, which are fewer than the training's after a resume.
    return _Loader(fabric.setup_dataloaders(batches, move_to_device=False)._dataloader, seed)


def held_out(batches: Any, seed: int) -> EpochBatches:
    """All batches, in every process, as a function of the epoch."""
    return batches if callable(batches) else _Loader(batches, seed)


class _Loader:
    """Any iterable of batches as a function of the epoch; on resume, earlier batches are drawn and dropped."""

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def __len__(self) -> int:
        try:
            return len(self.loader)  # type: ignore[arg-type]  # some iterables have no length
        except TypeError as error:
            raise RecipeError("batches have no length: pass a DataLoader, or harp.Batches") from error

    def __call__(self, epoch: int, start: int = 0) -> Iterator[Any]:
        order = derive(self.seed, "order", epoch)
        for sampler in _samplers(self.loader):
            # torch's own sampler only uses the epoch as a part of its seed, and does not know the training's seed.
            sampler.set_epoch(order if type(sampler) is DistributedSampler else epoch)
        torch.manual_seed(order)
        iterator = iter(self.loader)
        for number in range(len(self)):
            torch.manual_seed(derive(self.seed, "load", epoch, number))  # whatever the training has drawn
            batch = next(iterator)
            if number >= start:
                yield batch


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a loader that take the epoch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    unique = {id(sampler): sampler for sampler in samplers}.values()
    return [sampler for sampler in unique if hasattr(sampler, "set_epoch")]
