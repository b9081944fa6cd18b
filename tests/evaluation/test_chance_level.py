"""When a network counts as one that knows nothing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harp.evaluation import chance_level
from harp.evaluation.chance_level import at_chance, constant_accuracy, result_at_chance

TOTALS = st.lists(st.integers(0, 300), min_size=2, max_size=20).filter(lambda counts: sum(map(bool, counts)) > 1)


@given(TOTALS, st.booleans(), st.data())
def test_a_constant_answer_is_never_above_chance(totals: list[int], balanced: bool, data: st.DataObject) -> None:
    answer = data.draw(st.integers(0, len(totals) - 1))
    present = [count for count in totals if count]
    value = bool(totals[answer]) / len(present) if balanced else totals[answer] / sum(totals)
    told = at_chance(1.0, totals, balanced)
    assert told is False, "a network without a mistake is not at chance"
    assert value <= constant_accuracy(totals, balanced)
    if min(present) >= 20 and (balanced or max(present) < 0.8 * sum(present)):
        assert at_chance(value, totals, balanced)


@given(TOTALS, st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_what_is_above_chance_stays_so_when_it_gets_better(
    totals: list[int], balanced: bool, first: float, second: float
) -> None:
    worse, better = sorted((first, second))
    assert at_chance(worse, totals, balanced) or not at_chance(better, totals, balanced)


@given(st.integers(2, 100), st.integers(30, 500), st.booleans())
def test_more_images_tell_more(classes: int, each: int, balanced: bool) -> None:
    totals, value = [each] * classes, 2.0 / classes
    if classes > 2 and not at_chance(value, totals, balanced):
        assert not at_chance(value, [4 * count for count in totals], balanced)
    assert at_chance(1 / classes, [10_000] * classes, balanced)
    assert not at_chance(1 / classes + 0.05, [10_000] * classes, balanced)


def test_guessing_is_at_chance_nearly_always() -> None:
    draw = random.Random(0)
    totals = [100] * 10
    guessed = [sum(draw.random() < 0.1 for _ in range(1000)) / 1000 for _ in range(200)]
    assert sum(at_chance(value, totals) for value in guessed) >= 190


@pytest.mark.parametrize(
    ("value", "totals", "balanced", "expected"),
    [
        (0.100, [100] * 10, False, True),
        (0.115, [100] * 10, False, True),  # 9.7 to 13.6 %
        (0.130, [100] * 10, False, False),
        (0.0, [100] * 10, False, True),  # worse than chance is no better
        (0.90, [900, 100], False, True),  # always the frequent class
        (0.50, [900, 100], True, True),
        (0.60, [900, 100], True, False),
        (0.90, [900, 100], True, False),
        (0.01, [100] * 100, False, True),
        (0.02, [100] * 100, False, False),
        (0.2, [1] * 10, True, True),  # two of ten right
        (0.2, [5] * 10, False, False),  # ten of fifty: 11 to 33 %
        (0.2, [8, 6, 6, 5, 5, 5, 5, 4, 3, 3], False, True),  # one class is 16 % of so few images
        (0.4, [5] * 10, False, False),
        (0.0, [1, 1], False, False),  # too few to tell anything
        (0.0, [1, 1], True, False),
        (0.0, [3, 0], False, False),  # all of one class: the same
        (0.98, [98, 2], False, False),
        (0.0, [0, 0], False, False),
    ],
)
def test_cases(value: float, totals: list[int], balanced: bool, expected: bool) -> None:
    assert at_chance(value, totals, balanced) is expected


def number(value: float, measure: str = "accuracy", **more: object) -> dict[str, object]:
    return {"name": "natural", "value": value, "measure": measure, "totals": [100] * 10, "attack": None, **more}


def test_a_measured_number_is_judged_by_its_measure() -> None:
    totals = [900, 100]
    assert result_at_chance(number(0.9, totals=totals))
    assert not result_at_chance(number(0.9, "balanced accuracy", totals=totals))
    old = {"name": "natural", "value": 0.1, "totals": [100] * 10}
    assert result_at_chance(old), "old files may not say the measure"


def test_the_sentence_says_how_the_network_was_before() -> None:
    good, bad = number(0.84), number(0.1)
    attacked = number(0.1, attack={"epsilon": 0.1})
    assert chance_level.warning([good, attacked], [good]) is None, "only the natural accuracy counts"
    after = chance_level.warning([attacked, bad], [good])
    assert after is not None and after.startswith("Pruning left a network that answers at chance level")
    assert "10.0% on 1,000 test images" in after and "84.0% before pruning" in after
    both = chance_level.warning([bad], [bad])
    assert both is not None and "as it did before pruning (10.0%)" in both
    for alone in (chance_level.warning([bad], []), chance_level.warning([bad], [bad], trained=False)):
        assert alone is not None and "before" not in alone
    assert chance_level.warning([bad], [good], trained=False) == after, "it came with weights of its own"
