"""Models with trained weights, by one name that is short for a model, its options, its normalisation and a file.

`robustbench:NAME:FILE`          a checkpoint of RobustBench, downloaded by the user
`hf:OWNER/NAME`, with @REVISION  what `harp push` wrote to a hub
`zoo:NAME`                       a network that comes with the package
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harp.errors import CheckpointError, ModelError
from harp.models import zoo_cards as cards
from harp.models.robustbench import PUBLISHED
from harp.system import hub

ROBUSTBENCH = "robustbench:"
_LIBRARIES = ("torchvision:", "timm:")
_LARGEST = 1 << 20  # bytes of a recipe


def has_weights(spec: str) -> bool:
    """Whether a name is of a model with its weights."""
    return spec.startswith(ROBUSTBENCH) or hub.is_name(spec) or cards.name_in(spec) is not None


def written_out(spec: str) -> dict[str, Any] | None:
    """The keys of a recipe's model that a name is short for: name, options, normalize, weights; None: it is not."""
    if hub.is_name(spec):
        return _from_hub(spec)
    if (name := cards.name_in(spec)) is not None:
        facts = cards.card(name)
        return {"name": facts["model"], **facts["options"], "weights": str(cards.weights_file(name))}
    return _from_robustbench(spec) if spec.startswith(ROBUSTBENCH) else None


def local(file: str) -> str:
    """The file of weights on this machine: the weights of `hf:OWNER/NAME` are fetched."""
    return str(hub.fetch(file) / hub.WEIGHTS) if hub.is_name(file) else file


def fetched(target: str) -> Path:
    """The folder of a network on the hub, whose model is one of ours or of a library: no code of its owner runs."""
    folder = hub.fetch(target)
    _model_of(target, folder)
    return folder


def _from_robustbench(spec: str) -> dict[str, Any]:
    name, colon, file = spec.removeprefix(ROBUSTBENCH).partition(":")
    if name not in PUBLISHED:
        close = difflib.get_close_matches(name, list(PUBLISHED), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "docs/how-to/models.md says which are"
        raise ModelError(f"RobustBench's {name!r} is not known here: {hint}")
    if not colon or not file:
        raise ModelError(f"{spec} names no checkpoint: write {ROBUSTBENCH}{name}:FILE, downloaded by you")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelError(f"there is no file {file}, which {ROBUSTBENCH}{name} should be loaded from")
    published = PUBLISHED[name]
    normalize = {} if published.normalize is None else {"normalize": published.normalize}
    return {"name": published.model, **published.options, **normalize, "weights": str(path)}


def _from_hub(spec: str) -> dict[str, Any]:
    folder = hub.fetch(spec)
    part = _model_of(spec, folder)
    if (folder / "slim.json").is_file():
        raise ModelError(f"{spec} has channels cut out and can't be trained: evaluate it, or harp.load_run({spec!r})")
    if not (folder / hub.WEIGHTS).is_file():
        raise CheckpointError(f"{spec} has no {hub.WEIGHTS}")
    return {**part, "weights": str(folder / hub.WEIGHTS)}


def _model_of(target: str, folder: Path) -> dict[str, Any]:
    """The model of a fetched recipe, without the weights that it was trained from."""
    path = folder / "recipe.yaml"
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("it is larger than 1 MB")
        content = yaml.safe_load(path.read_text("utf-8"))
        part = content["model"]
        part = {"name": part} if isinstance(part, str) else dict(part)
        name = part["name"]
        if not isinstance(name, str):
            raise ValueError("its model has no name")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{target}: its recipe.yaml can't be used: {type(error).__name__}") from error
    if ".py" in name:
        raise ModelError(
            f"{target} is of a model in Python code ({name}), which is not run: name a definition of your own and its "
            f"weights, FILE.py:FUNCTION --weights {target}"
        )
    if ":" in name and not name.startswith(_LIBRARIES):
        raise ModelError(f"{target} is of the model {name!r}, which is not one of harp, torchvision or timm")
    part.pop("weights", None)
    if ":" in name:  # a library's function could be told to read other files, or to download some
        part.pop("pretrained", None)
        for key, value in part.items():
            if key != "name" and not _is_numeric(value):
                raise ModelError(
                    f"{target}: the option {key} of {name} is {value!r}; only numbers are taken from a hub"
                )
    return part


def _is_numeric(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_numeric, value))
    return value is None or (isinstance(value, (bool, int, float)) and not isinstance(value, Mapping))
