"""Attacks: frozen dataclasses, called as `attack(model, x, y) -> x_adv`.

All of them look for misclassified images inside the ball around an image and the box of valid images [0, 1]. The model
is attacked in eval mode and left exactly as it was: its modes, parameters, gradients and buffers.
"""

import re
from typing import Any

from harp.attacks.ball import NORMS, Attack, Ball, check_number, images_in_box, logits, step_size
from harp.attacks.pgd import CwInf, Fgsm, Pgd, ascend
from harp.errors import RecipeError

__all__ = [
    "ATTACKS",
    "NORMS",
    "Attack",
    "Ball",
    "CwInf",
    "Fgsm",
    "Pgd",
    "ascend",
    "check_number",
    "images_in_box",
    "logits",
    "named",
    "step_size",
]

ATTACKS: dict[str, type[Fgsm] | type[Pgd]] = {"fgsm": Fgsm, "pgd": Pgd, "cw": CwInf}


def named(text: str, **fields: Any) -> Fgsm | Pgd:
    """The attack of a short name: `fgsm`, `pgd-20` (steps), `pgd-20x5` (and restarts), `cw`; with more fields."""
    match = re.fullmatch(r"([a-z]+)(?:-(?P<steps>\d+)(?:x(?P<restarts>\d+))?)?", text)
    if match is None or match[1] not in ATTACKS:
        raise RecipeError(f"no attack is called {text!r}: there are {', '.join(ATTACKS)}, pgd-20, pgd-20x5")
    told: dict[str, Any] = {key: int(match[key]) for key in ("steps", "restarts") if match[key]}
    try:
        return ATTACKS[match[1]](**told, **fields)
    except TypeError as error:
        raise RecipeError(f"the attack {text!r} does not take these fields: {', '.join({**told, **fields})}") from error
