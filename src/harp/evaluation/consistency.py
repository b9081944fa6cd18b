"""Checks for results that contradict each other: signs of false robustness that can be seen without the model.

`harp.evaluation.gradient_masking` has the checks that need the model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from harp.evaluation.model_checks import Finding, Verdict, graded

# The attacks from weak to strong: an attack must not leave more images right than a weaker one.
_ORDER = ("fgsm", "pgd", "apgd", "aa-lite", "autoattack")
_MARGIN = 0.02  # half the interval of a result that has none

Row = Mapping[str, Any]
Comparison = tuple[Verdict, str]  # of two results: the verdict, and the text if it is not good

_GOOD = {
    "epsilon": "robust accuracy falls as epsilon grows",
    "order": "stronger attacks leave fewer images right",
    "black box": "attacks without gradients find hardly anything that those with gradients miss",
    "transfer": "transferred attacks are weaker than direct ones",
    "re-evaluation": "accuracy counted during the attack is the one found afterwards",
}


def review(results: Sequence[Row]) -> list[Finding]:
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
    return [finding for check, comparisons in checks if (finding := _summarised(check, list(comparisons)))]


def _summarised(check: str, comparisons: Sequence[Comparison]) -> Finding | None:
    """One finding for all comparisons of a check, with the worst verdict; None if there are none."""
    verdicts: tuple[Verdict, ...] = ("bad", "look")
    for verdict in verdicts:
        texts = [text for found, text in comparisons if found == verdict]
        if texts:
            more = f" ({len(texts) - 1} more like this)" if len(texts) > 1 else ""
            return Finding(check, verdict, texts[0] + more)
    return Finding(check, "good", _GOOD[check]) if comparisons else None


def _rising(results: Sequence[Row], numbers: Sequence[Row]) -> Iterator[Comparison]:
    """Accuracies at growing epsilon, which must not rise."""
    curves = [(str(row.get("name", "the curve")), list(row["points"])) for row in results if row.get("kind") == "curve"]
    by_attack: dict[str, list[Row]] = {}
    for row in numbers:
        attack = row.get("attack") or {}
        if "epsilon" in attack:
            rest = {key: value for key, value in attack.items() if key not in ("epsilon", "step")}
            by_attack.setdefault(repr((rest, row.get("data"))), []).append({**row, "epsilon": attack["epsilon"]})
    curves += [(str(rows[0].get("name")), rows) for rows in by_attack.values()]
    for name, points in curves:
        for small, large in combinations(sorted(points, key=lambda point: point["epsilon"]), 2):
            if large["epsilon"] > small["epsilon"]:
                yield (
                    "bad" if large["value"] > _high(small) else "good",
                    f"{name}: accuracy is {small['value']:.1%} at epsilon {small['epsilon']:.4g} but "
                    f"{large['value']:.1%} at {large['epsilon']:.4g}. The larger ball holds the smaller one, so the "
                    "attack fails; use a stronger one",
                )


def _disordered(numbers: Sequence[Row]) -> Iterator[Comparison]:
    """Accuracies under a weak and a strong attack; the strong one must not leave more images right."""
    for weak, strong in permutations(numbers, 2):
        if _weaker(weak, strong):
            same_images = all(weak.get(key) == strong.get(key) for key in ("n", "seed", "data"))
            lowest = strong["value"] if same_images else _low(strong)
            yield (
                "bad" if lowest > _high(weak) else "good",
                f"{strong['name']} leaves {strong['value']:.1%} right, the weaker {weak['name']} only "
                f"{weak['value']:.1%}. The stronger attack fails; look for masked gradients",
            )


def _weaker(weak: Row, strong: Row) -> bool:
    """Whether one attack must leave at least as many images right as another on the same data."""
    if weak.get("data") != strong.get("data") or not strong.get("attack"):
        return False
    if not weak.get("attack"):
        return True
    power, other = _power(weak), _power(strong)
    return power is not None and other is not None and _same_ball(weak, strong) and power < other


def _power(row: Row) -> tuple[int, int] | None:
    """The strength of an attack: its place in the order, and for PGD its number of steps; None if it has no place."""
    name, attack = str(row["name"]).lower(), row["attack"]
    rank = next((rank for rank, prefix in enumerate(_ORDER) if name.startswith(prefix)), None)
    if rank is None:
        return None
    return rank, int(attack.get("steps", 0)) * int(attack.get("restarts", 1)) if _ORDER[rank] == "pgd" else 0


def _black_box(numbers: Sequence[Row]) -> Iterator[Comparison]:
    """Images of an ensemble that only the attack without gradients fools."""
    for row in numbers:
        for part in (row.get("parts") or [])[1:]:
            if part["tried"] and str(part["attack"]).lower().startswith("square"):
                share = part["fooled"] / part["tried"]
                yield (
                    graded(share, 0.01, 0.05) if part["fooled"] > 1 else "good",
                    f"{row['name']}: Square, which sees no gradient, fools {part['fooled']} of {part['tried']} images "
                    f"({share:.1%}) that the attacks by gradients left right. Gradients are masked; trust no number "
                    "that comes from them alone",
                )


def _transferred(numbers: Sequence[Row]) -> Iterator[Comparison]:
    """Attacks made for another model, which must not be stronger than direct ones."""
    transfers = [row for row in numbers if str(row.get("name", "")).lower().startswith("transfer")]
    attacks = [row for row in numbers if row.get("attack") and row not in transfers]
    for transfer in transfers:
        direct = [row for row in attacks if _same_ball(row, transfer) and row.get("data") == transfer.get("data")]
        if direct:
            best = min(direct, key=lambda row: float(row["value"]))
            yield (
                "bad" if transfer["value"] < _low(best) else "good",
                f"{transfer['name']} leaves {transfer['value']:.1%} right, {best['name']} on the model itself "
                f"{best['value']:.1%}. An attack made for another model should not be stronger: gradients are masked",
            )


def _re_evaluated(numbers: Sequence[Row]) -> Iterator[Comparison]:
    """Accuracies counted during an attack and after it, which must be equal."""
    for row in numbers:
        if row.get("during") is not None:
            gap = abs(row["during"] - row["value"])
            yield (
                graded(gap, 0.001, 0.005) if gap * row.get("n", math.inf) > 1.5 else "good",
                f"{row['name']}: {row['during']:.2%} were counted during the attack and {row['value']:.2%} afterwards. "
                "The model answers otherwise when asked again: it is random, keeps a state, or its precision is low",
            )


def _same_ball(one: Row, other: Row) -> bool:
    first, second = one.get("attack") or {}, other.get("attack") or {}
    return all(first.get(key) == second.get(key) for key in ("epsilon", "norm"))


def _low(row: Row) -> float:
    return float(row.get("low", row["value"] - _MARGIN))


def _high(row: Row) -> float:
    return float(row.get("high", row["value"] + _MARGIN))
