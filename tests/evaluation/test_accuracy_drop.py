"""Which drops of accuracy are large."""

from typing import Any

import pytest

from harp.evaluation import accuracy_drop


def result(value: float, name: str = "pgd-20", half: float = 0.02, n: int = 1000, **attack: Any) -> dict[str, Any]:
    found = {"name": name, "value": value, "low": value - half, "high": value + half, "totals": [n // 10] * 10}
    return {**found, "attack": attack or None}


@pytest.mark.parametrize(
    ("before", "after", "large"),
    [
        (0.8, 0.4, True),
        (0.8, 0.56, True),  # two thirds of the 70 points above chance are left
        (0.8, 0.58, False),
        (0.4, 0.8, False),
        (0.1, 0.05, False),  # there was nothing to lose
    ],
)
def test_a_drop_is_measured_above_the_constant_answer(before: float, after: float, large: bool) -> None:
    assert accuracy_drop.is_large(result(after), result(before)) is large


def test_intervals_that_overlap_are_no_drop() -> None:
    assert not accuracy_drop.is_large(result(0.3, half=0.2), result(0.5, half=0.2))


def test_only_the_same_test_is_compared() -> None:
    before = [result(0.8, "natural"), result(0.6, epsilon=0.1)]
    assert accuracy_drop.warning([result(0.2, epsilon=0.2)], before) is None
    text = accuracy_drop.warning([result(0.75, "natural"), result(0.2, epsilon=0.1)], before)
    assert text == "Pruning cost much accuracy: pgd-20 60.0% → 20.0%."
    assert text.startswith(accuracy_drop.BEGINNINGS)


def test_the_remark_is_chance_before_it_is_a_drop() -> None:
    before = [result(0.8, "natural")]
    assert accuracy_drop.remark([result(0.1, "natural")], before) == accuracy_drop.CHANCE
    assert accuracy_drop.remark([result(0.4, "natural")], before) == accuracy_drop.LOW
    assert accuracy_drop.remark([result(0.78, "natural")], before) == ""
