"""Asks a fresh process whether a file answers as it should."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import harp
from harp.errors import ModelError

PATIENCE = 600.0
"""Seconds that a fresh process may take to open a file and answer."""

BOUND = 1e-5
"""The largest error of a file, relative to the largest logit: what another order of summation may do."""


@dataclass(frozen=True)
class Checked:
    """What the other process found: the error, images with another class, whether it needed torch."""

    images: int
    error: float
    changed: int
    torch: bool

    def as_dict(self) -> dict[str, Any]:
        """The check in a manifest."""
        return {
            "images": self.images,
            "error": self.error,
            "bound": BOUND,
            "changed": self.changed,
            "torch": self.torch,
        }


def ask(form: str, path: Path, images: Tensor, expected: Tensor, about: dict[str, Any]) -> Checked:
    """Check a file in a fresh process; an error where its answers are not those that are expected."""
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "questions.npz"
        np.savez(questions, images=images.numpy(), logits=expected.double().numpy(), about=np.array(json.dumps(about)))
        # The same package as this one, wherever it was found; -P: what lies in the working folder is no module.
        home = str(Path(harp.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "harp.export.verify", form, str(path), str(questions)], timeout=PATIENCE,
                capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            told = f"{len(images)} images in {PATIENCE:g} seconds: it can't be checked, nothing was written"
            raise ModelError(f"the {form} file has not answered {told}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"the {form} file can't be used by another process: {lines[-1][:300]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if not found["error"] <= BOUND:
        raise ModelError(
            f"the {form} file answers otherwise than the network: {found['error']:.1e} of the largest logit, "
            f"{BOUND:.0e} is allowed; nothing was written"
        )
    return Checked(len(images), found["error"], found["changed"], found["torch"])
