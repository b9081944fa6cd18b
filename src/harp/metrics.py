"""The numbers of a training, epoch by epoch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harp import files


class MetricsFile:
    """One JSON line an epoch, and TensorBoard events where that is installed; an epoch done again replaces its line."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"))
        except ImportError:
            pass

    def write(self, record: Mapping[str, Any]) -> None:
        """Add an epoch."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        earlier = [line for line in lines if json.loads(line)["epoch"] < record["epoch"]]
        files.write_text(self.path, "\n".join([*earlier, json.dumps(record)]) + "\n")
        if self.board is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(key, value, record["epoch"])
            self.board.flush()

    def close(self) -> None:
        """Close the event file."""
        if self.board is not None:
            self.board.close()
