"""Recipes, studies and refusals for tests of the command."""

from collections.abc import Callable
from pathlib import Path

import yaml

from harp.errors import AT_CHANCE

Harp = Callable[..., tuple[int, str, str]]
FINISHED = (0, AT_CHANCE)
"""The exit codes of a finished run: trainings as short as those of tests may leave a network at chance level."""
RECIPE = {
    "name": "tiny",
    "data": {"name": "digits", "batch": 256, "holdout": 100, "pad": 1},
    "model": {"name": "tinynet", "width": 4},
    "objective": {"name": "pgd", "epsilon": 0.1, "step": 0.05, "steps": 1},
    "stages": [
        {"name": "pretrain", "pruner": "dense", "epochs": 1},
        {"name": "prune", "pruner": {"name": "harp", "keep": "5%"}, "epochs": 2},
        {"name": "finetune", "pruner": "fixed", "epochs": 1, "optimizer": {"lr": "1e-2"}},
    ],
    "evaluate": {"attacks": ["pgd-2"], "examples": 50},
}


def write_recipe(path: Path, **changes: object) -> str:
    path.write_text(yaml.safe_dump({**RECIPE, **changes}))
    return str(path)


def refused(harp: Harp, *words: str, said: str) -> None:
    """One line on standard error, exit code 2, nothing written."""
    before = sorted(Path().rglob("*"))
    code, out, err = harp(*words)
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert said in err, err
    assert sorted(Path().rglob("*")) == before, "nothing may be written"


STAGES = [
    {"name": "pretrain", "pruner": "dense", "epochs": 1},
    {"name": "prune", "pruner": {"name": "harp", "keep": "5%"}, "epochs": 1},
    {"name": "finetune", "pruner": "fixed", "epochs": 1, "optimizer": {"lr": 0.01}},
]

SHORT = {**RECIPE, "stages": STAGES}
STUDY = {"name": "t", "recipe": SHORT, "methods": ["harp", "magnitude"], "keep": ["10%"], "seeds": [0]}
