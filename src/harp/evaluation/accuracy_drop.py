"""Whether pruning cost much accuracy: the network after it against the one before it."""

from collections.abc import Mapping, Sequence
from typing import Any

from harp.evaluation.chance_level import constant_accuracy, is_balanced, natural, result_at_chance

CHANCE = "at chance level"
LOW = "far below the dense network"
BEGINNINGS = ("Pruning left", "Pruning cost", "The network answers")
"""Of the warnings of a run, those that are about its accuracy."""

LEFT = 2 / 3
"""A drop is large if less than this share is left of what the network before pruning had above the best constant."""


def is_large(after: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether the drop between two results of one test is large, and not only one between two draws of images."""
    constant = constant_accuracy(after["totals"], is_balanced(after)) if any(after["totals"]) else 0.0
    had, has = before["value"] - constant, after["value"] - constant
    return bool(had > 0 and has < LEFT * had and after["high"] < before["low"])


def large(
    results: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The tests with a large drop: the results before and after."""
    old = {_test(result): result for result in before}
    pairs = [(old[_test(result)], result) for result in results if _test(result) in old]
    return [(was, now) for was, now in pairs if is_large(now, was)]


def remark(results: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    """Why a network must not look like any other: at chance level, or far below the one before pruning; "" if not."""
    clean = natural(results)
    if clean is not None and result_at_chance(clean):
        return CHANCE
    return LOW if large(results, before) else ""


def _test(result: Mapping[str, Any]) -> tuple[Any, ...]:
    attack = result.get("attack") or {}
    return result["name"], attack.get("epsilon"), attack.get("norm")


def warning(results: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning in one sentence if pruning cost much accuracy; None otherwise."""
    drops = [f"{now['name']} {was['value']:.1%} → {now['value']:.1%}" for was, now in large(results, before)]
    return f"Pruning cost much accuracy: {', '.join(drops)}." if drops else None
