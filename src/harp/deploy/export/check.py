"""Check an exported file in a fresh process."""

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
"""The time limit in seconds of a fresh process that opens a file and computes."""

BOUND = 1e-5
"""The largest allowed error, relative to the largest logit: another order of summation stays below it."""


@dataclass(frozen=True)
class Checked:
    """The result of a check: the error, the number of images with another class, whether torch was loaded."""

    images: int
    error: float
    changed: int
    torch: bool

    def as_dict(self) -> dict[str, Any]:
        """The entry in a manifest."""
        return {
            "images": self.images,
            "error": self.error,
            "bound": BOUND,
            "changed": self.changed,
            "torch": self.torch,
        }


def ask(form: str, path: Path, images: Tensor, expected: Tensor, about: dict[str, Any]) -> Checked:
    """Check a file in a fresh process; raise `ModelError` if its logits are not the expected ones."""
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "questions.npz"
        np.savez(questions, images=images.numpy(), logits=expected.double().numpy(), about=np.array(json.dumps(about)))
        # The child imports this same package. -P keeps modules of the working folder out.
        home = str(Path(harp.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "harp.deploy.export.verify", form, str(path), str(questions)],
                timeout=PATIENCE,
                capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            work = f"{len(images)} images in {PATIENCE:g} seconds: it can't be checked, nothing was written"
            raise ModelError(f"the {form} file has not answered {work}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"the {form} file can't be used by another process: {lines[-1][:300]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    if not result["error"] <= BOUND:
        raise ModelError(
            f"the {form} file answers otherwise than the network: {result['error']:.1e} of the largest logit, "
            f"{BOUND:.0e} is allowed; nothing was written"
        )
    return Checked(len(images), result["error"], result["changed"], result["torch"])
