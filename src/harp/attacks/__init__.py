"""Attacks: frozen dataclasses, called as `attack(model, x, y) -> x_adv`.

All of them look for misclassified images in a ball around each image, inside the box of valid images [0, 1]. The model
is attacked in eval mode, and its modes, parameters, gradients and buffers do not change.
"""

import re
from collections.abc import Callable
from typing import Any

from harp.attacks.apgd import Apgd, ApgdDlr, ApgdT
from harp.attacks.autoattack import AutoAttack, AutoAttackLite
from harp.attacks.fab import Fab
from harp.attacks.fmn import Fmn
from harp.attacks.pgd import CwInf, Fgsm, Pgd, ascend
from harp.attacks.square import Square
from harp.attacks.threat import (
    NORMS,
    Attack,
    Ball,
    check_ball,
    check_number,
    images_in_box,
    length,
    logits,
    margin,
    step_size,
)
from harp.errors import RecipeError
from harp.system.nearest import unknown
from harp.system.numbers import brief

__all__ = [
    "ATTACKS",
    "NORMS",
    "Apgd",
    "ApgdDlr",
    "ApgdT",
    "Attack",
    "AutoAttack",
    "AutoAttackLite",
    "Ball",
    "CwInf",
    "Fab",
    "Fgsm",
    "Fmn",
    "Pgd",
    "Square",
    "as_attack",
    "ascend",
    "batched",
    "check_ball",
    "check_number",
    "fast_forward",
    "images_in_box",
    "length",
    "logits",
    "margin",
    "named",
    "step_size",
]

ATTACKS: dict[str, Callable[..., Attack]] = {
    "fgsm": Fgsm,
    "pgd": Pgd,
    "cw": CwInf,
    "apgd-ce": Apgd,
    "apgd-dlr": ApgdDlr,
    "apgd-t": ApgdT,
    "fab-t": Fab,
    "square": Square,
    "fmn": Fmn,
    "autoattack": AutoAttack,
    "aa-lite": AutoAttackLite,
}


def named(text: str, **fields: Any) -> Attack:
    """The attack with a short name such as `fgsm`, `pgd-20` (steps) or `apgd-ce-50x5` (steps and restarts)."""
    match = re.fullmatch(r"([a-z-]*[a-z])(?:-(?P<steps>\d+)(?:x(?P<restarts>\d+))?)?", text)
    if match is None or match[1] not in ATTACKS:
        raise RecipeError(unknown("attack", text, [*ATTACKS, "pgd-20", "pgd-20x5"]))
    numbers: dict[str, Any] = {key: int(match[key]) for key in ("steps", "restarts") if match[key]}
    try:
        return ATTACKS[match[1]](**numbers, **fields)
    except TypeError as error:
        raise RecipeError(f"the attack {text!r} does not take {', '.join({**numbers, **fields})}") from error


def as_attack(attack: Attack | str) -> Attack:
    """The attack itself, or the one with a short name such as `pgd-20`."""
    if isinstance(attack, str):
        return named(attack)
    if isinstance(attack, type) or not callable(attack):
        raise RecipeError(
            f"attack {brief(attack)}: give an attack, like harp.Pgd(steps=20), or its name, like 'pgd-20'"
        )
    return attack
