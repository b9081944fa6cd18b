"""Whether a network knows anything: its accuracy beside that of one that gives the same answer to every image."""

from collections.abc import Mapping, Sequence
from typing import Any

from harp.confidence import wilson


def constant_accuracy(totals: Sequence[int], balanced: bool = False) -> float:
    """The accuracy of the best constant answer, given the number of images of each class.

    It is the share of the most frequent class; of the balanced accuracy, one over the number of classes with images.
    """
    present = [count for count in totals if count]
    return 1 / len(present) if balanced else max(present) / sum(present)


def at_chance(value: float, totals: Sequence[int], balanced: bool = False) -> bool:
    """Whether an accuracy is no better than the best constant answer's, as far as so many images can tell.

    It is, if the lower end of its 95 % interval (Wilson's) is not above that. The balanced accuracy of C classes with
    n_c images each counts as one of C² / Σ 1/n_c images, which is all of them if the classes are equally large.

    If the images are so few, or so much of one class, that a network without a mistake would not pass either, they say
    nothing about the network, and the answer is no.
    """
    present = [count for count in totals if count]
    if not present:
        return False
    images = len(present) ** 2 / sum(1 / count for count in present) if balanced else sum(present)
    constant = constant_accuracy(present, balanced)
    if wilson(1.0, images)[0] <= constant:
        return False
    return wilson(value, images)[0] <= constant


def is_balanced(result: Mapping[str, Any]) -> bool:
    """Whether the value of a measured number is the mean over classes."""
    return str(result.get("measure", "")).startswith("balanced")


def result_at_chance(result: Mapping[str, Any]) -> bool:
    """The same of a measured number, as it is in a run's files."""
    return at_chance(result["value"], result["totals"], is_balanced(result))


def natural(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The accuracy without an attack, if it was measured."""
    return next((result for result in results if not result.get("attack")), None)


def warning(
    results: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], trained: bool = True
) -> str | None:
    """One sentence if a finished network answers at chance level.

    Arguments:
        before: what was measured before pruning; empty for a run that pruned nothing.
        trained: whether that network was meant to know anything: one with random weights is not compared with.
    """
    found, old = natural(results), natural(before)
    if found is None or not result_at_chance(found):
        return None
    share = constant_accuracy(found["totals"], is_balanced(found))
    known = f"natural accuracy {found['value']:.1%} on {sum(found['totals']):,} test images"
    numbers = f"{known}, where always the same answer gets {share:.1%}"
    if old is None or (not trained and result_at_chance(old)):
        return f"The network answers at chance level: {numbers}."
    if result_at_chance(old):
        return f"The network answers at chance level, as it did before pruning ({old['value']:.1%}): {numbers}."
    return f"Pruning left a network that answers at chance level: {numbers}; it was {old['value']:.1%} before pruning."
