"""Your images, in a folder a class."""

from dataclasses import dataclass
from pathlib import Path

from harp import readers
from harp.display import Quiet
from harp.sources.source import UNKNOWN, Encoded, Found


@dataclass(frozen=True)
class Folder(Encoded):
    """A folder with train and test, at the size you give."""

    def find(self, folder: Path, display: Quiet) -> Found:
        """List every image below `folder`."""
        with display.counting(f"list {folder.name}", 1):
            found = readers.list_image_folder(folder, display.count)
        return Found(*found, source=f"{folder}; {UNKNOWN}")
