"""The results of a comparison as rows: means and 95 % intervals over seeds, one block a budget, the best first."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harp.evaluation.confidence import interval
from harp.system.notebook import html_table
from harp.system.progress import duration

Record = Mapping[str, Any]  # a run: method, keep, seed, and its results or why it failed


class Results(dict[str, Any]):
    """The content of `results.json`, which a notebook shows as the tables of its budgets."""

    def _repr_html_(self) -> str:
        titles = columns(self["attack"], self["unit"])
        return "".join(html_table(title, titles, body) for title, body in blocks(self))


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each method and budget, within a budget by accuracy under attack; the dense network comes first."""
    groups: dict[tuple[float | None, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["keep"], record["method"]), []).append(record)
    rows = [_row(keep, method, group) for (keep, method), group in groups.items()]
    ranked = sorted(rows, key=_rank)
    best: dict[float, str] = {}
    for row in ranked:
        if row["keep"] is not None:
            first = best.setdefault(row["keep"], row["method"])
            row["lead"] = _lead(groups[row["keep"], first], groups[row["keep"], row["method"]])
    return ranked


def _lead(best: Sequence[Record], other: Sequence[Record]) -> dict[str, Any] | None:
    """The lead of the best row of a budget over another one under attack, paired by seed; None for itself."""
    theirs = {record["seed"]: record["robust"] for record in other if record["failed"] is None}
    pairs = [(r["robust"], theirs[r["seed"]]) for r in best if r["failed"] is None and r["seed"] in theirs]
    if best is other or not pairs:
        return None
    mean, half = interval([ours - their for ours, their in pairs])
    return {"mean": mean, "half": half, "seeds": len(pairs), "ahead": sum(ours > their for ours, their in pairs)}


def _rank(row: Record) -> tuple[float, float]:
    return -(row["keep"] or math.inf), math.inf if row["robust"] is None else -row["robust"]


def _row(keep: float | None, method: str, group: Sequence[Record]) -> dict[str, Any]:
    good = [record for record in group if record["failed"] is None]
    row: dict[str, Any] = {"method": method, "keep": keep, "seeds": len(group), "failed": len(group) - len(good)}
    row["reason"] = next((record["failed"] for record in group if record["failed"] is not None), None)
    row["epochs"] = "/".join(str(epochs) for epochs in group[0]["epochs"])
    for key in ("natural", "robust", "seconds"):
        mean, half = interval([record[key] for record in good]) if good else (None, None)
        row |= {key: mean, f"{key}_half": half}
    row["kept"] = [min(counts), max(counts)] if (counts := [record["kept"] for record in good]) else None
    row["at_chance"] = sum(record.get("at_chance", False) for record in good)
    row["budget_unmet"] = sum(not record.get("budget_met", True) for record in good)
    return row


def columns(attack: str, unit: str = "weights") -> tuple[str, ...]:
    """The titles of a table, whose budget counts `unit`; the last column has remarks."""
    return ("method", f"{unit} kept", "natural", attack, "behind the best", "epochs", "time", "failed", "")


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as text."""
    failed = f"{row['failed']} of {row['seeds']}" if row["failed"] else "–"
    return [
        row["method"],
        "–" if row["kept"] is None else "–".join(f"{count:,}" for count in dict.fromkeys(row["kept"])),
        accuracy(row["natural"], row["natural_half"]),
        accuracy(row["robust"], row["robust_half"]),
        _behind(row.get("lead")),
        row["epochs"],
        "–" if row["keep"] is None or row["seconds"] is None else duration(row["seconds"]),
        failed,
        "; ".join(remarks(row)),
    ]


def _behind(lead: Mapping[str, Any] | None) -> str:
    if lead is None:
        return "–"
    return f"{accuracy(lead['mean'], lead['half'])} on {lead['ahead']} of {lead['seeds']}"


def remarks(row: Mapping[str, Any]) -> list[str]:
    """Problems of a row's runs: at chance level, a budget that was not met in training, why they failed."""
    at_chance, unmet, seeds = row.get("at_chance"), row.get("budget_unmet"), row["seeds"]
    texts = [f"{at_chance} of {seeds} at chance"] if at_chance else []
    texts += [f"budget unmet in {unmet} of {seeds}"] if unmet else []
    return texts + ([row["reason"]] if row["reason"] else [])


def accuracy(mean: float | None, half: float | None) -> str:
    """A mean in per cent with half its interval; – if there is none."""
    if mean is None:
        return "–"
    return f"{100 * mean:.1f} ± " + ("–" if half is None or math.isnan(half) else f"{100 * half:.1f}")


def blocks(outcome: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Title and rows of the table of each budget; the dense network is on top of each."""
    rows, size, unit = (outcome[key] for key in ("rows", "size", "unit"))
    dense = [cells(row) for row in rows if row["keep"] is None]
    tables = []
    for keep in _shares(rows):
        text = f"{title(keep, size, unit)}, ranked by {outcome['rank_by']}"
        tables.append((text, [*dense, *(cells(row) for row in rows if row["keep"] == keep)]))
    return tables or [("dense", dense)]


def _shares(rows: Sequence[Record]) -> list[float]:
    """The budgets of a comparison, the largest first."""
    return list(dict.fromkeys(row["keep"] for row in rows if row["keep"] is not None))


def title(keep: float, size: int, unit: str = "weights") -> str:
    """A budget in words."""
    return f"keep {100 * keep:.10g} %: {math.floor(keep * size + 0.5):,} of {size:,} {unit}"


def overview(rows: Sequence[Record]) -> list[list[str]]:
    """Accuracy under attack of every method at every budget, the best at the smallest budget first."""
    shares = _shares(rows)
    texts = {(row["method"], row["keep"]): accuracy(row["robust"], row["robust_half"]) for row in rows}
    dense = [[row["method"], *[texts[row["method"], None]] * len(shares)] for row in rows if row["keep"] is None]
    pruned = sorted((row for row in rows if row["keep"] is not None), key=lambda row: row["keep"] != min(shares))
    methods = dict.fromkeys(row["method"] for row in pruned)
    return [*dense, *([method, *(texts.get((method, keep), "–") for keep in shares)] for method in methods)]


def notes(outcome: Mapping[str, Any]) -> list[str]:
    """The notes below a table."""
    seeds = len(outcome["seeds"])
    over = "one seed, no interval" if seeds == 1 else f"mean ± half the 95 % interval over {seeds} seeds (Student's t)"
    texts = [f"{outcome['measure'].capitalize()} in per cent on the test set: {over}."]
    texts.append(f"Ranked by {outcome['rank_by']}. Protocol {outcome['protocol']}: {outcome['protocol_meaning']}.")
    if seeds > 1:
        texts.append("Behind the best: points under attack, paired over the seeds, and on how many of them.")
    texts.append("Epochs: pre-training/pruning/fine-tuning, or one training from random weights.")
    for row in outcome["rows"]:
        if row["keep"] is None and row["seconds"]:
            what = "Pre-training" if row["method"] == "dense" else f"The pre-training of {row['method']}"
            took = f"{what} (epochs: {row['epochs']}) took {duration(row['seconds'])} a seed"
            texts.append(f"{took}; the methods that begin with it share it, and it is not in their times.")
    return texts


def markdown(outcome: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    head = columns(outcome["attack"], outcome["unit"])
    lines = [f"# {outcome['study']}", "", *([outcome["description"], ""] if outcome["description"] else [])]
    shares = _shares(outcome["rows"])
    if len(shares) > 1:
        titles = ("method", *(f"keep {100 * keep:.10g} %" for keep in shares))
        lines += [f"## {outcome['attack']}", "", _line(titles), "|---" * len(titles) + "|"]
        lines += [*map(_line, overview(outcome["rows"])), ""]
    for text, body in blocks(outcome):
        lines += [f"## {text}", "", _line(head), "|---" * len(head) + "|", *map(_line, body), ""]
    return "\n".join(lines + [f"- {note}" for note in notes(outcome)]) + "\n"


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"
