"""Where the files of a network are, and what is known of it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from harp.errors import ModelError
from harp.models import external
from harp.system.tensors import load_tensors

PREFIX = "zoo:"
_FOLDER = Path(__file__).parent / "zoo"


@cache
def all_cards() -> dict[str, dict[str, Any]]:
    """The cards of all networks, by the name of their folder."""
    files = sorted(_FOLDER.glob("*/card.json"))
    return {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}


def known() -> dict[str, tuple[str, str]]:
    """The folder and the budget of each name: NETWORK is dense, NETWORK-1% keeps 1 % of the weights."""
    return {
        network if budget == "dense" else f"{network}-{budget}": (network, budget)
        for network, facts in all_cards().items()
        for budget in facts["budgets"]
    }


def split(name: str) -> tuple[str, str]:
    """The folder and the budget of a name."""
    if name not in known():
        near = external.nearest(name, known())
        raise ModelError(f"the zoo has no network {name!r}{near}: it has {', '.join(known())}")
    return known()[name]


def card(name: str) -> dict[str, Any]:
    """What is known of a network."""
    network, budget = split(name)
    facts = dict(all_cards()[network])
    budgets = facts.pop("budgets")
    return {"name": name, **facts, **budgets[budget]}


def masks_of(name: str) -> dict[str, Tensor]:
    """The kept weights of a pruned network, as it holds them; empty for a dense one."""
    facts = card(name)
    if facts["kept"] == facts["size"]:
        return {}
    tensors, _ = load_tensors(weights_file(name))
    return {key: value != 0 for key, value in tensors.items() if value.ndim > 1}


def name_in(spec: str) -> str | None:
    """NAME of a model `zoo:NAME`; None for other models."""
    return spec.removeprefix(PREFIX) if spec.startswith(PREFIX) else None


def weights_file(name: str) -> Path:
    """The file with the weights of a network."""
    network, budget = split(name)
    return _FOLDER / network / f"{budget.removesuffix('%')}.safetensors"
