"""A deployed network as a torch module without gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from harp.data.dataset import TOLERANCE
from harp.errors import DataError, HarpError, ModelError
from harp.system.files import reason

Array = npt.NDArray[Any]


class Queried(nn.Module):
    """Images in [0, 1] to logits, by a function of arrays; there is no gradient.

    Arguments:
        name: its name in errors.
        ask: computes one row of logits for each of float32 images (N, C, H, W).
        digest: hexadecimal hash of all bytes that the logits depend on. It is the module's only tensor, so that
            different files have different fingerprints.
        shape: the shape of one image.
    """

    digest: Tensor

    def __init__(self, name: str, ask: Callable[[Array], Array], digest: str, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.name, self.ask, self.shape = name, ask, shape
        self.register_buffer("digest", torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8))
        self.classes = self._probed()

    def forward(self, x: Tensor) -> Tensor:
        """The logits; images outside [0, 1] or of another shape raise `DataError`."""
        if len(x) == 0:
            return x.new_zeros(0, self.classes)
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"{self.name} takes images of shape {self.shape}, not {tuple(x.shape[1:])}")
        low, high = (float(value) for value in torch.aminmax(x.detach()))
        if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
            raise DataError(f"{self.name} takes images in [0, 1], not [{low:g}, {high:g}]")
        images = x.detach().clamp(0, 1).to("cpu", torch.float32).contiguous().numpy()
        return torch.from_numpy(np.ascontiguousarray(self._asked(images))).to(x)

    def _asked(self, images: Array) -> Array:
        try:
            return self.ask(images)
        except HarpError:
            raise
        except Exception as error:  # a runtime may raise anything
            raise ModelError(f"{self.name} can't be computed: {reason(error)}") from error

    def _probed(self) -> int:
        """The number of classes, after checking that two images get a row of logits each."""
        logits = self._asked(np.full((2, *self.shape), 0.5, np.float32))
        if logits.ndim != 2 or len(logits) != 2 or logits.shape[1] < 2 or logits.dtype.kind != "f":
            actual = f"{logits.dtype} of shape {logits.shape}"
            raise ModelError(f"{self.name} gives {actual} for two images, expected floats of shape (2, classes)")
        return int(logits.shape[1])
