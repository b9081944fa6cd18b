"""Reads `.harp` files into torch tensors and masks."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harp.engine.format.reader import BadFile, read_sparse
from harp.errors import CheckpointError
from harp.system.files import StrPath, reason


def load(path: StrPath, limit: int = 1 << 31) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """The header, the tensors and the masks of a file; at most `limit` bytes of tensors."""
    try:
        header, stored = read_sparse(Path(path), limit)
        need = sum(
            math.prod(tensor.shape) * (tensor.values.itemsize + (tensor.indices is not None))
            for tensor in stored.values()
        )
        if need > limit:
            raise BadFile(f"the tensors and masks take {need} bytes, more than the limit of {limit}")
    except (OSError, BadFile) as error:
        raise CheckpointError(f"can't read {path}: {error if isinstance(error, BadFile) else reason(error)}") from error
    tensors, masks = {}, {}
    for name, (shape, indices, values) in stored.items():
        numbers = torch.from_numpy(values)
        if indices is not None:
            places = torch.from_numpy(indices)
            masks[name] = torch.zeros(math.prod(shape), dtype=torch.bool).index_fill_(0, places, True).view(shape)
            numbers = torch.zeros(math.prod(shape), dtype=numbers.dtype).index_copy_(0, places, numbers)
        tensors[name] = numbers.view(shape)
    return header, tensors, masks
