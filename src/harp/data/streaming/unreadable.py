"""Images that a training could not decode: told once each, kept in a file, and refused when they are too many."""

import logging
from pathlib import Path

from harp.errors import DataError
from harp.system import files

logger = logging.getLogger("harp")

SHARE = 0.001
"""The share of undecodable images that a training puts up with, unless told otherwise."""

_FEW = 10  # that many may be damaged in any data


class Corrupt:
    """The undecodable images of a training.

    Arguments:
        images: how many there are in all.
        share: of them that may be undecodable, or a count from 1 up; ten always may, unless it is zero.
        path: a file that takes a line for each. Several processes may add to one file, and what is in it already, from
            before an interruption, counts and is not told again.
    """

    def __init__(self, images: int, share: float = SHARE, path: Path | None = None) -> None:
        self.images, self.path = images, path
        self.limit = int(share) if share >= 1 or share == 0 else max(_FEW, int(share * images))
        self.found: list[str] = self._kept()
        self._refused = False  # the file could not be written, and that was said

    def tell(self, reason: str) -> None:
        """Take note of an image; raises `DataError` when there are more than the limit."""
        if reason in self.found:
            return
        self.catch_up()
        if reason not in self.found:
            self._keep(reason)
            self._say(reason)
        if len(self.found) > self.limit:
            count = f"{len(self.found)} of {self.images:,} images can't be decoded, expected at most {self.limit}"
            raise DataError(f"{count} (data.corrupt); the first: {self.found[0]}")

    def catch_up(self) -> None:
        """Tell of the images that other processes have added to the file."""
        for reason in self._kept():
            if reason not in self.found:
                self._say(reason)

    def _say(self, reason: str) -> None:
        self.found.append(reason)
        logger.warning("%s; the next readable image takes its place", reason)

    def _kept(self) -> list[str]:
        if self.path is None or not self.path.is_file():
            return []
        return self.path.read_text("utf-8", "replace").splitlines()

    def _keep(self, reason: str) -> None:
        """One short write at the end of the file: other processes' lines stay whole. A full disk ends no training."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write(f"{reason}\n".encode("utf-8", "replace"))
        except OSError as error:
            if not self._refused:
                logger.warning("can't write %s: %s; damaged images are told here only", self.path, files.reason(error))
            self._refused = True
