"""The results of a run in words: one line before and after, and tables of layers and accuracies."""

from collections.abc import Mapping, Sequence
from typing import Any

from harp.evaluation.score import epsilon_text
from harp.experiments.run_folder import budget_of
from harp.system.progress import bar


def layer_columns(kind: str = "weights") -> tuple[str, ...]:
    """The titles of a table of layers; channels are named by the weight that reads them."""
    return ("read by" if kind == "channels" else "layer", kind, "kept", "rate", "")


def layer_rows(layers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row per layer, with a bar, and the total."""
    rows = [
        [name, f"{size:,}", f"{kept:,}", f"{kept / size:.3%}", bar(kept / size)]
        for name, size, kept in ((layer["name"], layer["size"], layer["kept"]) for layer in layers)
    ]
    size, kept = sum(layer["size"] for layer in layers), sum(layer["kept"] for layer in layers)
    return [*rows, ["total", f"{size:,}", f"{kept:,}", f"{kept / size:.3%}", ""]]


RESULT_COLUMNS = ("test", "before", "after", "95 % interval", "n", "epsilon")


def result_rows(dense: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row per accuracy, before and after pruning."""
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


def spending(summary: Mapping[str, Any]) -> list[str]:
    """What is kept: of the budget, of the units, and of a network without pruned channels also of its cost."""
    budget, layers, cost = budget_of(summary), summary["layers"], summary.get("cost") or {}
    kind, unit, size, kept = (budget[key] for key in ("kind", "unit", "size", "kept"))
    parts = [f"{unit} {size:,} → {kept:,} ({kept / size:.3%})"]
    if unit != kind:
        parts.append(f"{kind} {sum(layer['size'] for layer in layers):,} → {sum(layer['kept'] for layer in layers):,}")
    for key, words in (("macs", "MACs"), ("parameters", "parameters")) if kind == "channels" else ():
        if words != unit and None not in (cost.get(key), cost.get(f"{key}_kept")):
            parts.append(f"{words} {cost[key]:,} → {cost[f'{key}_kept']:,}")
    return parts


def headline(summary: Mapping[str, Any]) -> str:
    """The summary of a run in one line: what is kept, and the accuracies before and after."""
    before = {result["name"]: result["value"] for result in summary["dense"]}
    parts = spending(summary)
    for result in summary["results"]:
        old = f"{before[result['name']]:.1%} → " if result["name"] in before else ""
        parts.append(f"{result['name']} {old}{result['value']:.1%}")
    return ", ".join(parts)


def remarks(evaluation: Mapping[str, Any]) -> list[str]:
    """The remarks of an evaluation beside its numbers, one line each."""
    lines = []
    attacked = [result for result in evaluation["results"] if result["attack"]]
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
    if "curve" in evaluation:
        points = ", ".join(f"{point['epsilon']:.3g}: {point['value']:.1%}" for point in evaluation["curve"]["points"])
        lines.append(f"accuracy over epsilon  {points}")
    if "distances" in evaluation:
        lines.append(f"median distance to an adversarial image: {evaluation['distances']['median']:.4g}")
    if "corruptions" in evaluation:
        lines.append(f"mean accuracy over corruptions: {evaluation['corruptions']['mean']:.1%}")
    if "flips" in evaluation:
        flips = evaluation["flips"]
        lines.append(
            f"pruning changed {flips['changed']} of {flips['n']} predictions: {flips['lost']} lost, {flips['won']} won"
        )
    return lines


def count_text(count: int) -> str:
    """A large number in short."""
    for size, name in ((10**9, " G"), (10**6, " M"), (10**4, " k")):
        if count >= size:
            unit = size if size != 10**4 else 1000
            return f"{count / unit:.3g}{name}"
    return f"{count:,}"


def bytes_text(count: int) -> str:
    """The size of a file."""
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count} B"
