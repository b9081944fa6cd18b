"""Numbers that contradict each other: another sign of false robustness, seen without the model (`harp.suspicion`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from harp.doctor import Finding, Verdict, graded

# The attacks by strength: none of them may leave more images right than one above it.
_ORDER = ("fgsm", "pgd", "apgd", "aa-lite", "autoattack")
_BESIDE = 0.02  # of a number that came without its interval


def review(results: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Examine measured numbers for contradictions: a finding for each check that they allow.

    The rows are those of a summary's results (name, value, low, high, n, seed, attack), where ensembles may have
    `parts` and numbers `during` (the accuracy counted while attacking), and security curves, whose `points` have
    epsilon, value, low and high.
    """
    numbers = [row for row in results if row.get("kind") != "curve"]
    checks = [
        ("epsilon", _rising(results, numbers)),
        ("order", _disordered(numbers)),
        ("black box", _black_box(numbers)),
        ("transfer", _transferred(numbers)),
        ("re-evaluation", _re_evaluated(numbers)),
    ]
    return [_summed(check, found) for check, found in checks if found]


@dataclass(frozen=True)
class _Comparison:
    """Two numbers that were held against each other: how it came out, and in words if it is suspicious."""

    verdict: Verdict = "good"
    text: str = ""


_GOOD = {
    "epsilon": "robust accuracy falls as epsilon grows",
    "order": "stronger attacks leave fewer images right",
    "black box": "attacks without gradients find hardly anything that those with gradients miss",
    "transfer": "transferred attacks are weaker than direct ones",
    "re-evaluation": "accuracy counted during the attack is the one found afterwards",
}


def _summed(check: str, found: Sequence[_Comparison]) -> Finding:
    verdicts: tuple[Verdict, ...] = ("bad", "look")
    for verdict in verdicts:
        texts = [each.text for each in found if each.verdict == verdict]
        if texts:
            more = f" ({len(texts) - 1} more like this)" if len(texts) > 1 else ""
            return Finding(check, verdict, texts[0] + more)
    return Finding(check, "good", _GOOD[check])


def _rising(results: Sequence[Mapping[str, Any]], numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    curves = [(str(row.get("name", "the curve")), list(row["points"])) for row in results if row.get("kind") == "curve"]
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in numbers:
        attack = row.get("attack") or {}
        if "epsilon" in attack:
            rest = {key: value for key, value in attack.items() if key not in ("epsilon", "step")}
            alike.setdefault(repr((rest, row.get("data"))), []).append({**row, "epsilon": attack["epsilon"]})
    curves += [(str(rows[0].get("name")), rows) for rows in alike.values()]
    found = []
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
                found.append(_Comparison("bad", text) if worse else _Comparison())
    return found


def _disordered(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    found = []
    for weak in numbers:
        for strong in numbers:
            if _weaker(weak, strong):
                limit = strong["value"] if _same_images(weak, strong) else _low(strong)
                text = (
                    f"{strong['name']} leaves {strong['value']:.1%} right, the weaker {weak['name']} only "
                    f"{weak['value']:.1%}. The stronger attack fails; look for masked gradients"
                )
                found.append(_Comparison("bad", text) if limit > _high(weak) else _Comparison())
    return found


def _weaker(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> bool:
    """Whether one attack must leave at least as many images right as another on the same data."""
    if not _same_data(weak, strong) or not strong.get("attack"):
        return False
    if not weak.get("attack"):
        return True
    ranked = _rank(weak) is not None and _rank(strong) is not None
    return ranked and _same_ball(weak, strong) and _power(weak) < _power(strong)


def _power(row: Mapping[str, Any]) -> tuple[int, int]:
    attack, rank = row.get("attack") or {}, _rank(row) or 0
    work = int(attack.get("steps", 0)) * int(attack.get("restarts", 1)) if _ORDER[rank] == "pgd" else 0
    return rank, work


def _rank(row: Mapping[str, Any]) -> int | None:
    """The place in the order by strength, if the attack has one."""
    name = str(row["name"]).lower()
    return next((rank for rank, attack in enumerate(_ORDER) if name.startswith(attack)), None)


def _black_box(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    found = []
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
                found.append(_Comparison(graded(share, 0.01, 0.05) if part["fooled"] > 1 else "good", text))
    return found


def _transferred(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    found = []
    for moved in (row for row in numbers if _is_transfer(row)):
        direct = [
            row
            for row in numbers
            if row.get("attack") and not _is_transfer(row) and _same_ball(row, moved) and _same_data(row, moved)
        ]
        if direct:
            best = min(direct, key=lambda row: float(row["value"]))
            text = (
                f"{moved['name']} leaves {moved['value']:.1%} right, {best['name']} on the model itself "
                f"{best['value']:.1%}. An attack made for another model should not be stronger: gradients are masked"
            )
            found.append(_Comparison("bad", text) if moved["value"] < _low(best) else _Comparison())
    return found


def _re_evaluated(numbers: Sequence[Mapping[str, Any]]) -> list[_Comparison]:
    found = []
    for row in numbers:
        if row.get("during") is not None:
            off = abs(row["during"] - row["value"])
            text = (
                f"{row['name']}: {row['during']:.2%} were counted during the attack and {row['value']:.2%} afterwards. "
                "The model answers otherwise when asked again: it is random, keeps a state, or its precision is low"
            )
            found.append(_Comparison(graded(off, 0.001, 0.005) if off * row.get("n", math.inf) > 1.5 else "good", text))
    return found


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
    return float(row.get("low", row["value"] - _BESIDE))


def _high(row: Mapping[str, Any]) -> float:
    return float(row.get("high", row["value"] + _BESIDE))
