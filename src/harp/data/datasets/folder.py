"""Your images, in a folder a class."""

from dataclasses import dataclass
from pathlib import Path

from harp.data import formats
from harp.data.datasets.base import UNKNOWN, Encoded, Found
from harp.system.progress import Quiet


@dataclass(frozen=True)
class Folder(Encoded):
    """A folder with train and test, at the size you give."""

    def find(self, folder: Path, display: Quiet) -> Found:
        """List every image below `folder`."""
        with display.counting(f"list {folder.name}", 1):
            found = formats.list_image_folder(folder, display.count)
        return Found(*found, source=f"{folder}; {UNKNOWN}")
