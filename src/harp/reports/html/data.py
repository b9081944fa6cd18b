"""The report as data: the records of all runs, how they are grouped, and every table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import harp
from harp.experiments.records import Examples
from harp.reports.html.blocks import Block, Figure, Fold, Report, Table, Verdicts
from harp.reports.html.collect import Run
from harp.reports.html.groups import NATURAL, Estimate, Runs
from harp.reports.html.histograms import Histogram

FORMAT = 1


def content(report: Report, runs: Runs, histograms: Mapping[str, Sequence[Histogram]]) -> dict[str, Any]:
    """All that the page shows, except the pictures."""
    networks = []
    for variant in runs.variants:
        scores = [
            {"attack": name, "epsilon": epsilon, "norm": norm or None}
            | {"before": _score(variant.before(key)), "after": _score(variant.after(key))}
            for key in [NATURAL, *runs.attacks]
            for name, epsilon, norm in [key]
        ]
        networks.append(
            {
                "label": variant.label,
                "method": variant.method,
                "kind": variant.kind,
                "unit": variant.unit,
                "kept": variant.share,
                "seeds": [run.seed for run in variant.runs],
                "runs": [run.folder.name for run in variant.runs],
                "accuracy": scores,
                "weights": [asdict(one) for one in histograms.get(variant.label, [])],
            }
        )
    return {
        "format": FORMAT,
        "harp": harp.__version__,
        "title": report.title,
        "subtitle": report.subtitle,
        "headline": report.headline,
        "warnings": [*report.warnings, *report.notes],
        "networks": networks,
        "runs": [_run(run) for run in runs.all],
        "sections": [
            {"title": section.title, "tables": [table for block in section.blocks for table in _tables(block)]}
            for section in report.sections
        ],
    }


def _score(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _run(run: Run) -> dict[str, Any]:
    evaluation = []
    for record in run.found:
        # Not the pictures, and not which of thousands of images were right: the evaluation's own files have that.
        pictures = {"items": {"__all__": {"image", "attacked"}}} if isinstance(record, Examples) else {}
        evaluation.append(record.model_dump(exclude={"images": True, **pictures}))
    return {
        "folder": run.folder.name,
        "seed": run.seed,
        "recipe": run.recipe,
        "summary": run.summary.model_dump(),
        "stages": [{"folder": name, **(file.model_dump() if file else {})} for name, file in run.stages.items()],
        "evaluation": evaluation,
    }


def _tables(block: Block) -> list[dict[str, Any]]:
    match block:
        case Table():
            return [{"title": block.title, "columns": list(block.columns), "rows": [list(row) for row in block.rows]}]
        case Figure():
            return [{**table, "title": block.title} for table in _tables(block.table)]
        case Verdicts():
            return [{"title": block.title, "findings": [asdict(item) for item in block.items]}]
        case Fold():
            return [table for inner in block.blocks for table in _tables(inner)]
        case _:
            return []
