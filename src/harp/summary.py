"""The end of a run in words: one line before and after, a table of the layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from harp.display import bar

LAYER_COLUMNS = ("layer", "weights", "kept", "rate", "")


def layer_rows(layers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a layer, with a bar, and the total."""
    rows = [
        [name, f"{size:,}", f"{kept:,}", f"{kept / size:.3%}", bar(kept / size)]
        for name, size, kept in ((layer["name"], layer["size"], layer["kept"]) for layer in layers)
    ]
    size, kept = sum(layer["size"] for layer in layers), sum(layer["kept"] for layer in layers)
    return [*rows, ["total", f"{size:,}", f"{kept:,}", f"{kept / size:.3%}", ""]]


RESULT_COLUMNS = ("test", "before", "after", "95 % interval", "n", "epsilon")


def result_rows(dense: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a measured number, before and after pruning."""
    before = {result["name"]: f"{result['value']:.1%}" for result in dense}
    return [
        [
            result["name"],
            before.get(result["name"], "–"),
            f"{result['value']:.1%}",
            f"{result['low']:.1%} – {result['high']:.1%}",
            f"{result['n']:,}",
            epsilon_text(result),
        ]
        for result in results
    ]


def epsilon_text(result: Mapping[str, Any]) -> str:
    """The epsilon of a number, in 255ths where it is a round one."""
    epsilon = (result.get("attack") or {}).get("epsilon")
    if epsilon is None:
        return "–"
    levels = epsilon * 255
    return f"{round(levels)}/255" if abs(levels - round(levels)) < 1e-6 else f"{epsilon:.4g}"


def headline(
    dense: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]]
) -> str:
    """Weights and accuracies before and after, in one line."""
    size, kept = sum(layer["size"] for layer in layers), sum(layer["kept"] for layer in layers)
    before = {result["name"]: result["value"] for result in dense}
    parts = [f"weights {size:,} → {kept:,} ({kept / size:.3%})"]
    for result in results:
        old = f"{before[result['name']]:.1%} → " if result["name"] in before else ""
        parts.append(f"{result['name']} {old}{result['value']:.1%}")
    return ", ".join(parts)


def remarks(found: Mapping[str, Any]) -> list[str]:
    """What an evaluation has to say beside its numbers, a line each."""
    lines = []
    attacked = [result for result in found["results"] if result["attack"]]
    if attacked:
        lowest = min(attacked, key=lambda result: result["value"])
        shares = [c / t for c, t in zip(lowest["correct"], lowest["totals"], strict=True) if t]
        names = [n for n, t in zip(lowest["classes"], lowest["totals"], strict=True) if t]
        worst = min(range(len(shares)), key=shares.__getitem__)
        lines.append(f"worst class under {lowest['name']}: {names[worst]}, {shares[worst]:.1%}")
    for result in attacked:
        if "during" in result:
            lines.append(
                f"{result['name']}: {result['during']:.2%} while attacking, {result['accuracy']:.2%} measured again"
            )
        for part in result.get("parts", ()) if len(result.get("parts", ())) > 1 else ():
            words = f" ({part['words']})" if part["words"] else ""
            lines.append(f"{result['name']}: {part['attack']}{words} fooled {part['fooled']} of {part['tried']}")
    if "curve" in found:
        points = ", ".join(f"{point['epsilon']:.3g}: {point['value']:.1%}" for point in found["curve"]["points"])
        lines.append(f"accuracy over epsilon  {points}")
    if "distances" in found:
        lines.append(f"median distance to an adversarial image: {found['distances']['median']:.4g}")
    if "corruptions" in found:
        lines.append(f"mean accuracy over corruptions: {found['corruptions']['mean']:.1%}")
    if "flips" in found:
        flips = found["flips"]
        lines.append(
            f"pruning changed {flips['changed']} of {flips['n']} predictions: {flips['lost']} lost, {flips['won']} won"
        )
    return lines
