"""The file of a training's metrics, one line an epoch."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harp.errors import DiskError
from harp.system import files

logger = logging.getLogger("harp")


class MetricsFile:
    """One JSON line an epoch, and TensorBoard events if it is installed; a repeated epoch replaces its line.

    A failed write does not stop the training: the lines are written with the next epoch.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.lines: dict[int, str] = {}  # of this process, by epoch
        self.behind = False  # whether the last write failed
        self.board: Any = None
        self.make: Any = None  # the class of the board, if TensorBoard is installed
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.make = SummaryWriter

    def write(self, record: Mapping[str, Any]) -> None:
        """Add an epoch."""
        self.lines[record["epoch"]] = json.dumps(record)
        self._write_lines()
        if self.make is not None:
            self._write_events(record)

    def _write_lines(self) -> None:
        """Write the lines of this process after those of earlier processes."""
        earlier = {number: line for number, line in _lines(self.path).items() if number < min(self.lines)}
        merged = earlier | self.lines
        try:
            files.write_text(self.path, "".join(f"{merged[number]}\n" for number in sorted(merged)))
            self.behind = False
        except DiskError as error:
            logger.warning("%s; it is written with the next epoch", error)
            self.behind = True

    def _write_events(self, record: Mapping[str, Any]) -> None:
        """Add an epoch to TensorBoard's events; events of an earlier process from this epoch on are hidden."""
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
        """Write the remaining lines, and close the event file."""
        if self.behind:
            self._write_lines()
        if self.board is not None:
            with suppress(OSError):  # the training is complete without the last events
                self.board.close()


def _lines(path: Path) -> dict[int, str]:
    """The lines of a file by epoch, without damaged ones."""
    lines: dict[int, str] = {}
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            lines[int(json.loads(line)["epoch"])] = line
        except (ValueError, KeyError, TypeError):
            logger.warning("a damaged line of %s is left out: %.40s", path, line)
    return lines
