"""Load a network whose pruned channels were cut out: this file needs nothing but torch and safetensors.

    from rebuild import rebuild          # this file, with model.safetensors and slim.json beside it
    network = rebuild(architecture())    # the architecture as it was before pruning, with any weights

`slim.json` names the tensors that are smaller than the architecture's, the sizes that its modules store as attributes,
and the attention modules that are replaced by the one in `attention.py` beside this file, which can have fewer heads.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn


def rebuild(model: nn.Module, folder: str | Path | None = None) -> nn.Module:
    """Change `model` in place to the network of a folder (by default this file's folder), and return it."""
    place = Path(__file__).parent if folder is None else Path(folder)
    description = json.loads((place / "slim.json").read_text(encoding="utf-8"))
    tensors = load_file(place / "model.safetensors")
    shrink(model, description, tensors, _attention(place) if description["swapped"] else None)
    model.load_state_dict(tensors)
    return model


def shrink(model: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, Any], attention: Any) -> None:
    """Replace the tensors and sizes of `model` that a description names; tensors that are shared stay shared."""
    for name in description["swapped"]:
        _put(model, name, attention.of(model.get_submodule(name)))
    for name in description["added"]:
        _put(model, name, nn.Parameter(tensors[name]))
    small: dict[int, Any] = {}
    for name, tensor in _named(model):
        if name in description["shapes"] and id(tensor) not in small:
            is_parameter = isinstance(tensor, nn.Parameter)
            small[id(tensor)] = nn.Parameter(tensors[name], tensor.requires_grad) if is_parameter else tensors[name]
    for name, tensor in _named(model):
        if id(tensor) in small:
            _put(model, name, small[id(tensor)])
    for owner, numbers in description["sizes"].items():
        for attribute, number in numbers.items():
            setattr(model.get_submodule(owner), attribute, number)


def _named(model: nn.Module) -> list[tuple[str, Any]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _put(model: nn.Module, name: str, value: Any) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, value)


def _attention(place: Path) -> Any:
    """The class of `attention.py` beside the weights."""
    spec = importlib.util.spec_from_file_location("attention", place / "attention.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Attention
