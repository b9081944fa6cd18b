"""The collective operations of a training, beside the reduction of gradients.

A batch is distributed over W processes row by row: process r has the rows r, r + W, r + 2W, ...
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def mean(fabric: Any, value: float) -> float:
    """The mean of a number over the processes."""
    if fabric.world_size == 1:
        return value
    number = torch.tensor(value, dtype=torch.float64, device=fabric.device)
    return float(fabric.all_reduce(number, reduce_op="mean"))


def whole(fabric: Any, rows: Tensor) -> Tensor:
    """All rows of a batch in their original order, gathered from the rows of each process."""
    if fabric.world_size == 1:
        return rows
    return torch.stack(_all_gather(fabric, rows), 1).flatten(0, 1)


def own(fabric: Any, rows: Tensor) -> Tensor:
    """This process's rows of a batch."""
    return rows[fabric.global_rank :: fabric.world_size].to(fabric.device)


def first_different_rank(fabric: Any, tensors: Iterable[Tensor]) -> int | None:
    """The rank of the first process whose tensors differ from those of process 0, compared by digest."""
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    own_digest = int.from_bytes(hasher.digest(), "big") >> 1  # 63 bits, which fit into an int64
    digests = [int(digest) for digest in _all_gather(fabric, torch.tensor(own_digest, device=fabric.device))]
    return next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)


def _all_gather(fabric: Any, tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return parts
