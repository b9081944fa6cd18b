"""Checks for results that contradict each other: signs of false robustness that can be seen without the model.

`harp.evaluation.gradient_masking` has the checks that need the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from harp.evaluation.model_checks import Finding, Verdict, graded

# The attacks from weak to strong: an attack must not leave more images right than a weaker one.
_ORDER = ("fgsm", "pgd", "apgd", "aa-lite", "autoattack")
_MARGIN = 0.02  # half the interval of a result that has none


def review(results: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Check results for contradictions: a finding for each check that can be made.

    The rows are those of a summary's results (name, value, low, high, n, seed, attack). Ensembles may have `parts`,
    and results may have `during` (the accuracy counted during the attack). Security curves have `points` with epsilon,
    value, low and high.
    """
    numbers = [row for row in results if row.get("kind") != "curve"]
    checks = [
        ("epsilon", _rising(results, numbers)),
        ("order", _disordered(numbers)),
        ("black box", _black_box(numbers)),
        ("transfer", _transferred(numbers)),
        ("re-evaluation", _re_evaluated(numbers)),
    ]
    return [_summarised(check, comparisons) for check, comparisons in checks if comparisons]


@dataclass(frozen=True)
class _Comparison:
    """A comparison of two results: the verdict, and a text if it is suspicious."""

    verdict: Verdict = "good"
    text: str = ""


_GOOD = {
    "epsilon": "robust accuracy falls as epsilon grows",
    "order": "stronger attacks leave fewer images right",
    "black box": "attacks without gradients find hardly anything that those with gradients miss",
    "transfer": "transferred attacks are weaker than direct ones",
    "re-evaluation": "accuracy counted during the attack is the one found afterwards",
}


def _summarised(check: str, comparisons: Sequence[_Comparison]) -> Finding:
    """One finding for all comparisons of a check, with the worst verdict."""
    verdicts: tuple[Verdict, ...] = ("bad", "look")
    for verdict in verdicts:
        texts = [comparison.text for comparison in comparisons if comparison.verdict == verdict]
        if texts:
            more = f" ({len(texts) - 1} more like this)" if len(texts) > 1 else ""
            return Finding(check, verdict, texts[0] + more)
    return Finding(check, "good", _GOOD[check])


def _rising(results: Sequence[Mapping[str, Any]], numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    """Accuracies at growing epsilon, which must not rise."""
    curves = [(str(row.get("name", "the curve")), list(row["points"])) for row in results if row.get("kind") == "curve"]
    by_attack: dict[str, list[dict[str, Any]]] = {}
    for row in numbers:
        attack = row.get("attack") or {}
        if "epsilon" in attack:
            rest = {key: value for key, value in attack.items() if key not in ("epsilon", "step")}
            by_attack.setdefault(repr((rest, row.get("data"))), []).append({**row, "epsilon": attack["epsilon"]})
    curves += [(str(rows[0].get("name")), rows) for rows in by_attack.values()]
    comparisons = []
    for name, points in curves:
        ordered = sorted(points, key=lambda point: point["epsilon"])
        for small, large in combinations(ordered, 2):
            if large["epsilon"] > small["epsilon"]:
                worse = large["value"] > _high(small)
                text = (
                    f"{name}: accuracy is {small['value']:.1%} at epsilon {small['epsilon']:.4g} but "
                    f"{large['value']:.1%} at {large['epsilon']:.4g}. The larger ball holds the smaller one, so the "
                    "attack fails; use a stronger one"
                )
                comparisons.append(_Comparison("bad", text) if worse else _Comparison())
    return comparisons


def _disordered(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    """Accuracies under a weak and a strong attack; the strong one must not leave more images right."""
    comparisons = []
    for weak in numbers:
        for strong in numbers:
            if _weaker(weak, strong):
                limit = strong["value"] if _same_images(weak, strong) else _low(strong)
                text = (
                    f"{strong['name']} leaves {strong['value']:.1%} right, the weaker {weak['name']} only "
                    f"{weak['value']:.1%}. The stronger attack fails; look for masked gradients"
                )
                comparisons.append(_Comparison("bad", text) if limit > _high(weak) else _Comparison())
    return comparisons


def _weaker(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> bool:
    """Whether one attack must leave at least as many images right as another on the same data."""
    if not _same_data(weak, strong) or not strong.get("attack"):
        return False
    if not weak.get("attack"):
        return True
    ranked = _rank(weak) is not None and _rank(strong) is not None
    return ranked and _same_ball(weak, strong) and _power(weak) < _power(strong)


def _power(row: Mapping[str, Any]) -> tuple[int, int]:
    """The strength of an attack, for comparison: its rank, and for PGD its number of steps."""
    attack, rank = row.get("attack") or {}, _rank(row) or 0
    work = int(attack.get("steps", 0)) * int(attack.get("restarts", 1)) if _ORDER[rank] == "pgd" else 0
    return rank, work


def _rank(row: Mapping[str, Any]) -> int | None:
    """The place in the order by strength, if the attack has one."""
    name = str(row["name"]).lower()
    return next((rank for rank, attack in enumerate(_ORDER) if name.startswith(attack)), None)


def _black_box(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    """Images of an ensemble that only the attack without gradients fools."""
    comparisons = []
    for row in numbers:
        parts = row.get("parts") or []
        for index, part in enumerate(parts):
            if index and part["tried"] and str(part["attack"]).lower().startswith("square"):
                share = part["fooled"] / part["tried"]
                text = (
                    f"{row['name']}: Square, which sees no gradient, fools {part['fooled']} of {part['tried']} images "
                    f"({share:.1%}) that the attacks by gradients left right. Gradients are masked; trust no number "
                    "that comes from them alone"
                )
                comparisons.append(_Comparison(graded(share, 0.01, 0.05) if part["fooled"] > 1 else "good", text))
    return comparisons


def _transferred(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    """Attacks made for another model, which must not be stronger than direct ones."""
    comparisons = []
    for transfer in (row for row in numbers if _is_transfer(row)):
        direct = [
            row
            for row in numbers
            if row.get("attack") and not _is_transfer(row) and _same_ball(row, transfer) and _same_data(row, transfer)
        ]
        if direct:
            best = min(direct, key=lambda row: float(row["value"]))
            text = (
                f"{transfer['name']} leaves {transfer['value']:.1%} right, {best['name']} on the model itself "
                f"{best['value']:.1%}. An attack made for another model should not be stronger: gradients are masked"
            )
            comparisons.append(_Comparison("bad", text) if transfer["value"] < _low(best) else _Comparison())
    return comparisons


def _re_evaluated(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    """Accuracies counted during an attack and after it, which must be equal."""
    comparisons = []
    for row in numbers:
        if row.get("during") is not None:
            gap = abs(row["during"] - row["value"])
            text = (
                f"{row['name']}: {row['during']:.2%} were counted during the attack and {row['value']:.2%} afterwards. "
                "The model answers otherwise when asked again: it is random, keeps a state, or its precision is low"
            )
            comparisons.append(
                _Comparison(graded(gap, 0.001, 0.005) if gap * row.get("n", math.inf) > 1.5 else "good", text)
            )
    return comparisons


def _is_transfer(row: Mapping[str, Any]) -> bool:
    return str(row.get("name", "")).lower().startswith("transfer")


def _same_ball(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    first, second = one.get("attack") or {}, other.get("attack") or {}
    return all(first.get(key) == second.get(key) for key in ("epsilon", "norm"))


def _same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one.get("data") == other.get("data"))


def _same_images(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in ("n", "seed", "data"))


def _low(row: Mapping[str, Any]) -> float:
    return float(row.get("low", row["value"] - _MARGIN))


def _high(row: Mapping[str, Any]) -> float:
    return float(row.get("high", row["value"] + _MARGIN))
