"""The data sets that are shipped with the package."""

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from harp.data import formats
from harp.data.dataset import DataSet
from harp.data.datasets.base import Source, split_of
from harp.data.datasets.npz import KEYS
from harp.data.formats import Payload
from harp.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Embedded(Source):
    """An .npz file inside the package."""

    classes: tuple[str, ...]
    flip: bool
    origin: str
    sha256: str

    def read(self, folder: Path, size: int | None) -> DataSet:
        """Read it from the package, whatever the folder."""
        data = (resources.files("harp.data") / "embedded" / f"{self.name}.npz").read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise DataError(f"embedded {self.name}.npz: another sha256 than released, expected an intact installation")
        arrays = formats.read_npz(Payload(f"{self.name}.npz", data), KEYS)
        train, test = (
            split_of(np.array(arrays[f"x_{part}"])[:, None], arrays[f"y_{part}"].astype(np.int64))
            for part in ("train", "test")
        )
        return DataSet(
            name=self.name,
            train=train,
            test=test,
            classes=self.classes,
            balanced=False,
            flip=self.flip,
            source=f"{self.origin}; checksum agrees",
            verified=True,
        )
