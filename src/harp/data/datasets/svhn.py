"""SVHN: two MATLAB files."""

from pathlib import Path

import numpy as np

from harp.data.dataset import DataSet
from harp.data.datasets.base import Part, Published, md5
from harp.data.formats.bounded import read_file
from harp.data.formats.matlab import read_mat5
from harp.errors import DataError

_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}


class Svhn(Published):
    """The cropped digits of SVHN."""

    def read(self, folder: Path) -> DataSet:
        """Read both files from the first folder that has the training file."""
        place = next((place for place in self.places(folder) if (place / "train_32x32.mat").is_file()), folder)
        train, test = (self._file(place / file) for file in _MD5)
        return self.assemble([train], test, place)

    def _file(self, path: Path) -> Part:
        """X is 32x32x3xN and y calls the digit 0 a 10."""
        if not path.exists():
            raise self.missing(path.name, path.parent)
        payload = read_file(path, "a MATLAB v5 file")
        variables = read_mat5(payload)
        images, labels = variables.get("X"), variables.get("y")
        if images is None or labels is None:
            raise DataError(f"{path}: variables {', '.join(variables) or 'none'}, expected X and y")
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
            raise DataError(f"{path}: X is {images.dtype} {images.shape}, expected uint8 (32, 32, 3, N)")
        if labels.size != images.shape[3]:
            raise DataError(f"{path}: {labels.size:,} labels, expected one for each of {images.shape[3]:,} images")
        if wrong := [value for value in np.unique(labels).tolist() if value not in range(11)]:
            raise DataError(f"{path}: label {wrong[0]} in y, expected 1 to 10")
        agrees = md5(payload.data) == _MD5[path.name]
        planes = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
        return Part(path.name, planes, labels.reshape(-1).astype(np.int64) % 10, agrees)
