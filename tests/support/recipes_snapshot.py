"""A snapshot of every recipe and study that can be named.

`PYTHONPATH=tests python -m support.recipes_snapshot` writes it anew.

A recipe is noted by the hash of its resolved content, defaults included, and by the identity of its last stage, which
names the files of a finished run. A few are noted in full, to show what a difference is.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harp.experiments import compose, study

FILE = Path(__file__).parent / "recipes_snapshot.json"
IN_FULL = (
    "cifar10/resnet18/harp-s2ap-pgd-99.9",
    "cifar10/vgg16/hydra-lamp-natural-99",
    "cifar10/vgg16/harp-channels-4x",
    "fashion/mad-99",
    "imagenet/resnet50/harp-free-90",
    "svhn/vgg16/harp-mart-99",
    "tiny-imagenet/vgg16/dnr-pgd-95.2",
)


def snapshot() -> dict[str, Any]:
    """The snapshot on file."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def resolved(name: str) -> dict[str, Any]:
    """A recipe with all its defaults."""
    return compose.load(name).model_dump(mode="json")


def recipe_line(name: str) -> str:
    """The hash of a recipe's content, and the identity of its last stage."""
    loaded = compose.load(name)
    return f"{_hash(loaded.model_dump(mode='json'))} {loaded.identity(len(loaded.stages))}"


def study_line(name: str) -> str:
    """The hash of a study's content, its recipe included."""
    loaded = study.load(name)
    return _hash({**asdict(loaded), "recipe": loaded.recipe.model_dump(mode="json")})


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write(recipes: list[str], studies: list[str]) -> None:
    """Write the snapshot of these names, a line each."""
    parts: dict[str, dict[str, Any]] = {
        "recipes": {name: recipe_line(name) for name in recipes},
        "studies": {name: study_line(name) for name in studies},
        "in full": {name: resolved(name) for name in IN_FULL},
    }
    lines = {
        key: ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) for key, part in parts.items()
    }
    text = ",\n".join(f" {json.dumps(key)}: {{\n{part}\n }}" for key, part in lines.items())
    FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    write(list(snapshot()["recipes"]), list(snapshot()["studies"]))
