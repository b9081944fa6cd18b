"""A finished run on a hub: its network, its sparse file, and its card as the page of the repository."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harp.deploy.export import api
from harp.errors import RecipeError
from harp.experiments import run_folder
from harp.reports import card
from harp.system import hub


def push(run: str | Path, target: str, *, private: bool = False, license: str | None = None) -> str:
    """Write a finished run to the repository `OWNER/NAME` of the Hugging Face Hub, and give the commit's address.

    The network is there as weights and masks, and as a sparse file that `harp.load` runs. No path of this machine and
    no code is written.

    Arguments:
        run: the folder of a finished run.
        target: OWNER/NAME, or OWNER/NAME@BRANCH.
        private: make a new repository private.
        license: as the hub names licences, such as "apache-2.0"; by default the page says that it is unknown.

    Example:
        harp.push("runs/mine-0123456789ab", "me/robust-resnet18")
    """
    name = target if hub.is_name(target) else hub.PREFIX + target
    hub.repository(name)
    folder = Path(run)
    finished = run_folder.read(folder)
    content: dict[str, Path | bytes] = {
        "README.md": (card.card(folder, license) + _usage(name)).encode(),
        "recipe.yaml": yaml.safe_dump(without_paths(finished.content), sort_keys=False, allow_unicode=True).encode(),
        "summary.json": json.dumps(_shareable(finished.summary), indent=2, allow_nan=False).encode(),
    }
    for file in (hub.WEIGHTS, "masks.safetensors", "slim.json"):
        if (folder / file).is_file():
            content[file] = folder / file
    with tempfile.TemporaryDirectory() as scratch:
        api.export(folder, "sparse", scratch)
        (written,) = Path(scratch).glob("*.harp")
        content[hub.SPARSE] = written
        return hub.publish(name, content, private=private)


def without_paths(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a recipe with the names of files instead of their places on this machine."""
    content = json.loads(json.dumps(recipe))
    for key, inner in (("model", "name"), ("model", "weights"), ("data", "name")):
        part = content.get(key)
        if isinstance(part, str) and inner == "name":
            content[key] = Path(part).name
        elif isinstance(part, dict) and isinstance(part.get(inner), str):
            part[inner] = Path(part[inner]).name
    if not isinstance(content, dict):
        raise RecipeError("a recipe is a mapping of keys")
    return content


def _shareable(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {**summary, "source": card.meaningful(str(summary.get("source", "")))}


def _usage(name: str) -> str:
    return f"""
## From the hub

```python
import harp

network = harp.load("{name}")  # the sparse file; it needs no torch
run = harp.load_run("{name}")  # run.model is the network in torch
```

`harp evaluate {name}` attacks it, `harp prune {name} --data DATA --keep 1%` trains it further.
"""
