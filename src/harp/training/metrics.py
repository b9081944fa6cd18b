"""The numbers of a training, epoch by epoch."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harp import files
from harp.errors import DiskError

logger = logging.getLogger("harp")


class MetricsFile:
    """One JSON line an epoch, and TensorBoard events where that is installed; an epoch done again replaces its line.

    A disk that takes nothing costs no training: the lines are written when it has room again.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.lines: dict[int, str] = {}  # of this process, by epoch
        self.behind = False  # a line could not be written yet
        self.board: Any = None
        self.make: Any = None  # what makes the board, where TensorBoard is installed
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.make = SummaryWriter
        except ImportError:
            pass

    def write(self, record: Mapping[str, Any]) -> None:
        """Add an epoch."""
        self.lines[record["epoch"]] = json.dumps(record)
        self._put()
        if self.make is not None:
            self._show(record)

    def _put(self) -> None:
        """Write the lines of this process behind those of earlier ones."""
        earlier = {number: line for number, line in _lines(self.path).items() if number < min(self.lines)}
        merged = earlier | self.lines
        try:
            files.write_text(self.path, "".join(f"{merged[number]}\n" for number in sorted(merged)))
            self.behind = False
        except DiskError as error:
            logger.warning("%s; it is written with the next epoch", error)
            self.behind = True

    def _show(self, record: Mapping[str, Any]) -> None:
        """Add an epoch to TensorBoard's events; those of an earlier process from this epoch on no longer count."""
        try:
            if self.board is None:
                self.board = self.make(str(self.path.parent / "tensorboard"), purge_step=record["epoch"])
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(key, value, record["epoch"])
            self.board.flush()
        except OSError as error:
            logger.warning("no more events for TensorBoard in %s: %s", self.path.parent, files.reason(error))
            self.board = self.make = None

    def close(self) -> None:
        """Write what is left to write, and close the event file."""
        if self.behind:
            self._put()
        if self.board is not None:
            with suppress(OSError):  # the last events: a training has ended well without them
                self.board.close()


def _lines(path: Path) -> dict[int, str]:
    """The lines of a file by their epochs; what is no such line is left out."""
    found: dict[int, str] = {}
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            found[int(json.loads(line)["epoch"])] = line
        except (ValueError, KeyError, TypeError):
            logger.warning("a damaged line of %s is left out: %.40s", path, line)
    return found
