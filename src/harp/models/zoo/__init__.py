"""Small robust networks that come with the package, trained by us: dense, and pruned to several budgets.

    harp.zoo.names()
    model = harp.zoo.load("digits-tinynet-1%")

Each network is a folder here: its recipe, the weights and the `.harp` file of each budget, and `card.json` with how it
was trained and what was measured. `scripts/make-zoo` makes all of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from harp.errors import ModelError
from harp.models import external, small
from harp.models import zoo_cards as cards
from harp.models.weights import load_weights
from harp.models.zoo_cards import name_in, weights_file

__all__ = ["card", "load", "masks", "name_in", "names", "path", "weights_file"]

_FACTORIES: dict[str, Callable[..., nn.Module]] = {"tinynet": small.tinynet, "vgg8": small.vgg8}


def names() -> list[str]:
    """The networks: NETWORK is dense, NETWORK-1% keeps 1 % of the weights.

    Example:
        for name in harp.zoo.names():
            print(name)
    """
    return list(cards.known())


def card(name: str) -> dict[str, Any]:
    """What is known of a network: its data set, the threat it was trained for, its training, and what was measured.

    Arguments:
        name: one of `names()`.

    Example:
        facts = harp.zoo.card("digits-tinynet-1%")
        print(facts["data"], facts["epsilon"], facts["kept"], facts["results"])
    """
    return cards.card(name)


def load(name: str) -> nn.Module:
    """A network as a torch module in eval mode. It takes images in [0, 1].

    Arguments:
        name: one of `names()`.

    Example:
        model = harp.zoo.load("digits-tinynet-1%")
        print(sum(int(weight.count_nonzero()) for weight in model.parameters() if weight.ndim > 1))
    """
    facts = card(name)
    factory = _FACTORIES[facts["model"]]
    model: nn.Module = external.call(factory, name, facts["classes"], tuple(facts["shape"]), facts["options"])
    load_weights(model, weights_file(name))
    return model.eval()


def masks(name: str) -> dict[str, Tensor]:
    """The kept weights of a pruned network, by parameter; empty for a dense one.

    Arguments:
        name: one of `names()`.

    Example:
        masks = harp.zoo.masks("digits-tinynet-1%")
        print(sum(int(mask.sum()) for mask in masks.values()))
    """
    return cards.masks_of(name)


def path(name: str) -> Path:
    """The `.harp` file of a pruned network, for `harp.load` or another reader of the format.

    Arguments:
        name: one of `names()` that is pruned.

    Example:
        engine = harp.load(harp.zoo.path("digits-tinynet-1%"))
    """
    file = weights_file(name).with_suffix(".harp")
    if not file.is_file():
        raise ModelError(f"{name} is dense: only pruned networks of the zoo have a .harp file")
    return file
