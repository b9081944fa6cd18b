"""What there is to choose from, one line each."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from harp.data import DATASETS
from harp.errors import RecipeError
from harp.models import MODELS
from harp.pruners import PRUNERS
from harp.recipe import shipped, unknown
from harp.study import shipped as shipped_studies


def rows(what: str) -> list[tuple[str, str]]:
    """The names and descriptions of a kind of thing."""
    if what not in _KINDS:
        raise RecipeError(unknown("list", what, _KINDS))
    return _KINDS[what]()


def _methods() -> list[tuple[str, str]]:
    return [(name, (pruner.__doc__ or "").strip().splitlines()[0]) for name, pruner in PRUNERS.items()]


def _models() -> list[tuple[str, str]]:
    own = [(name, entry.description) for name, entry in MODELS.items()]
    others = [
        ("torchvision:NAME", "any classifier of torchvision"),
        ("timm:NAME", "any classifier of timm"),
        ("path/to/file.py:function", "a function of yours that returns a module"),
    ]
    return own + others


def _data() -> list[tuple[str, str]]:
    return [(name, source.description) for name, source in DATASETS.items()]


def _recipes() -> list[tuple[str, str]]:
    return _described(shipped())


def _studies() -> list[tuple[str, str]]:
    return _described(shipped_studies())


def _described(found: Mapping[str, Path]) -> list[tuple[str, str]]:
    read = {name: yaml.safe_load(path.read_text(encoding="utf-8")) for name, path in found.items()}
    return [(name, content.get("description", "")) for name, content in read.items()]


_KINDS = {"methods": _methods, "models": _models, "data": _data, "recipes": _recipes, "studies": _studies}
