"""The command that does one run, the same wherever it is started."""

import sys
from pathlib import Path


def harp_run(
    recipe: Path,
    out: Path,
    data_dir: Path | None,
    *,
    devices: int = 1,
    workers: int | None = None,
    minutes: float | None = None,
) -> tuple[str, ...]:
    """The words of `harp run` for a recipe file, by this Python; it may take so many minutes."""
    words = [sys.executable, "-m", "harp", "run", str(recipe), "--out", str(out)]
    words += [] if data_dir is None else ["--data-dir", str(data_dir)]
    words += [] if workers is None else ["--workers", str(workers)]
    words += [] if minutes is None else ["--max-minutes", f"{minutes:.3f}"]
    return tuple(words if devices == 1 else [*words, "--devices", str(devices)])
