"""A small recipe as a user would write it."""

from typing import Any

PLAIN: dict[str, Any] = {
    "name": "plain",
    "data": {"name": "fashion"},
    "model": {"name": "convnet"},
    "stages": [
        {"name": "pretrain", "pruner": "dense", "epochs": 2},
        {"name": "prune", "pruner": {"name": "harp", "keep": "1%"}, "epochs": 2},
        {"name": "finetune", "pruner": "fixed", "epochs": 2},
    ],
}
