"""Tiny-ImageNet: 200 classes of ImageNet at 64x64 pixels."""

from dataclasses import dataclass
from pathlib import Path

from harp.data import formats
from harp.data.datasets.base import UNKNOWN, Encoded, Found
from harp.data.datasets.wordnet import class_names, read_words
from harp.errors import DataError
from harp.system.progress import Quiet


@dataclass(frozen=True)
class TinyImageNet(Encoded):
    """As it was published, or with one folder a class in val as well; classes are in the order of their synsets.

    The test images have no labels and are left alone.
    """

    def find(self, folder: Path, display: Quiet) -> Found:
        """List the first place that has training images."""
        places = (folder / self.name, folder / "tiny-imagenet-200", folder)
        place = next((place for place in places if (place / "train").is_dir() and (place / "val").is_dir()), None)
        if place is None:
            raise DataError(f"{self.name}: no train and val in {folder}, expected {self.files}")
        with display.counting(f"list {self.name}", 1):
            found = formats.list_image_folder(place, display.count, held="val")
        names = class_names(found.classes, read_words(place / "words.txt"))
        return Found(*found[:4], classes=names, source=f"{place}; {UNKNOWN}")
