"""Your images, in a folder a class."""

from pathlib import Path

from harp import readers
from harp.errors import DataError
from harp.sources.source import UNKNOWN, Source, split_of
from harp.split import DataSet


class Folder(Source):
    """A folder with train and test, at the size you give."""

    def read(self, folder: Path, size: int | None) -> DataSet:
        """Decode and resize every image below `folder`."""
        if size is None:
            raise DataError(f"folder: no image size for {folder}, expected size= in pixels, such as 64")
        found = readers.read_image_folder(folder, size)
        return DataSet(
            name=self.name,
            train=split_of(found.train_images, found.train_labels),
            test=split_of(found.test_images, found.test_labels),
            classes=found.classes,
            balanced=False,
            flip=True,
            source=f"{folder}; {UNKNOWN}",
            verified=False,
        )
