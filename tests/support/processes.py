"""Commands that start several processes."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from support.paths import SUPPORT


def run(*command: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def recipe(folder: Path) -> Path:
    """A recipe for a network in float64."""
    text = (SUPPORT / "distributed_recipe.yaml").read_text(encoding="utf-8")
    path = folder / "small.yaml"
    path.write_text(text.replace("MODEL", f"{SUPPORT / 'double_model.py'}:network"), encoding="utf-8")
    return path


def numbers(out: Path) -> tuple[Any, ...]:
    """What a run came to: the layers, and the images of each class that are right under each attack."""
    (path,) = out.glob("small-*/summary.json")
    found = json.loads(path.read_text())
    keys = ("name", "correct", "totals", "value", "low", "high", "attack")
    results = [{key: row[key] for key in keys} for row in (*found["results"], *found["dense"])]
    return [(layer["name"], layer["kept"]) for layer in found["layers"]], results
