"""Numbers that contradict each other are found, and those that agree raise no suspicion."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harp.evaluation.consistency import review
from support.findings import suspicious


def number(name: str, value: float, epsilon: float | None = 8 / 255, **more: Any) -> dict[str, Any]:
    attack = None if epsilon is None else {"type": name, "epsilon": epsilon, "norm": "linf"}
    rows = {"name": name, "value": value, "low": value - 0.02, "high": value + 0.02, "n": 1000, "seed": 0, "data": "d"}
    return {**rows, "attack": attack, **more}


SOUND = [
    number("natural", 0.8, None),
    number("fgsm", 0.55),
    number("pgd-20", 0.5),
    number("cw", 0.49),
    number("apgd-ce-100", 0.48),
    number(
        "autoattack",
        0.45,
        during=0.45,
        parts=[
            {"attack": "apgd-ce-100", "tried": 800, "fooled": 320, "left": 480},
            {"attack": "square-5000", "tried": 480, "fooled": 1, "left": 479},
        ],
    ),
    number("transfer:other", 0.7),
    {
        "kind": "curve",
        "name": "pgd-20",
        "points": [
            {"epsilon": e, "value": 0.8 - 9 * e, "low": 0.78 - 9 * e, "high": 0.82 - 9 * e} for e in (0, 0.03, 0.06)
        ],
    },
]


def test_numbers_that_agree_raise_no_suspicion() -> None:
    findings = review(SOUND)
    assert suspicious(findings) == {}
    assert [each.check for each in findings] == ["epsilon", "order", "black box", "transfer", "re-evaluation"]
    assert review([]) == [] and review(SOUND[:1]) == []


CONTRADICTIONS: dict[str, tuple[list[Mapping[str, Any]], str, str, tuple[str, ...]]] = {
    "curve": (
        [{"kind": "curve", "name": "pgd-20", "points": [
            {"epsilon": 0.1, "value": 0.5, "low": 0.48, "high": 0.52},
            {"epsilon": 0.05, "value": 0.4, "low": 0.38, "high": 0.42},
        ]}],
        "epsilon", "bad", ("40.0%", "50.0%", "0.05"),
    ),
    "two epsilons": (
        [number("pgd-20", 0.4, 0.03), number("pgd-20", 0.5, 0.06)], "epsilon", "bad", ("40.0%", "50.0%"),
    ),
    "fgsm below pgd": ([number("fgsm", 0.3), number("pgd-20", 0.5)], "order", "bad", ("pgd-20", "50.0%", "fgsm")),
    "above natural": ([number("natural", 0.5, None), number("cw", 0.6)], "order", "bad", ("natural",)),
    "apgd above pgd": ([number("pgd-10", 0.4), number("apgd-ce-50x5", 0.45)], "order", "bad", ("apgd-ce-50x5",)),
    "autoattack above apgd": ([number("apgd-t", 0.4), number("autoattack", 0.45)], "order", "bad", ("autoattack",)),
    "square": (
        [number("autoattack", 0.3, parts=[
            {"attack": "apgd-ce-100", "tried": 800, "fooled": 300, "left": 500},
            {"attack": "square-5000", "tried": 500, "fooled": 200, "left": 300},
        ])],
        "black box", "bad", ("200", "40.0%"),
    ),
    "a little of square": (
        [number("autoattack", 0.3, parts=[
            {"attack": "apgd-ce-100", "tried": 800, "fooled": 300, "left": 500},
            {"attack": "square-5000", "tried": 500, "fooled": 10, "left": 490},
        ])],
        "black box", "look", ("2.0%",),
    ),
    "transfer": ([number("transfer:vgg", 0.3), number("pgd-20", 0.5)], "transfer", "bad", ("transfer:vgg", "30.0%")),
    "during": ([number("pgd-20", 0.5, during=0.4)], "re-evaluation", "bad", ("40.00%", "50.00%")),
    "during, by a few": ([number("pgd-20", 0.5, during=0.497)], "re-evaluation", "look", ("49.70%",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_found(name: str) -> None:
    rows, check, verdict, words = CONTRADICTIONS[name]
    (found,) = (each for each in review(rows) if each.check == check)
    assert found.verdict == verdict
    assert all(word in found.text for word in words), found.text
    assert suspicious(review(rows)) == {check: verdict}


def test_results_that_can_not_be_compared_are_skipped() -> None:
    assert suspicious(review([number("fgsm", 0.3, 0.1), number("pgd-20", 0.5, 0.05)])) == {}
    assert suspicious(review([number("fgsm", 0.3), number("pgd-20", 0.5, data="other")])) == {}
    other = number("pgd-20", 0.33, seed=1)  # other images: its own interval counts too
    assert suspicious(review([number("fgsm", 0.3), other])) == {}
    assert suspicious(review([number("fgsm", 0.3), {**other, "seed": 0}])) == {"order": "bad"}


def test_several_contradictions_are_one_finding() -> None:
    rows = [number("fgsm", 0.3), number("pgd-20", 0.5), number("apgd-t", 0.5)]
    (found,) = review(rows)
    assert found.text.endswith("(1 more like this)")


@given(st.lists(st.floats(0.05, 0.95), min_size=2, max_size=8, unique=True))
def test_a_falling_curve_is_never_suspicious_and_a_rising_one_always(values: list[float]) -> None:
    def curve(ordered: list[float]) -> list[Mapping[str, Any]]:
        points = [{"epsilon": i / 10, "value": v, "low": v, "high": v} for i, v in enumerate(ordered)]
        return [{"kind": "curve", "points": points}]

    assert suspicious(review(curve(sorted(values, reverse=True)))) == {}
    assert suspicious(review(curve(sorted(values)))) == {"epsilon": "bad"}
