"""Every script and notebook of examples/ runs in its short form, in a process and a folder of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

EXAMPLES = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*.ipynb")])


def cells(notebook: Path) -> str:
    """The code of a notebook, from top to bottom."""
    content = json.loads(notebook.read_text("utf-8"))
    return "\n\n".join("".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    words = ["-c", cells(example)] if example.suffix == ".ipynb" else [str(example), "--quick"]
    environment = os.environ | {"EPOCHS": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("notebook", [path for path in EXAMPLES if path.suffix == ".ipynb"], ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs(notebook: Path) -> None:
    content = json.loads(notebook.read_text("utf-8"))
    assert not any(cell.get("outputs") for cell in content["cells"])


def test_the_list_names_every_example() -> None:
    listed = (ROOT / "examples" / "README.md").read_text("utf-8")
    assert all(f"]({path.name})" in listed for path in EXAMPLES)
