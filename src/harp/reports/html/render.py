"""A report as an HTML file that needs no other file, as Markdown, and as data."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

import harp
from harp.experiments.records import Examples
from harp.reports import plots, templating
from harp.reports.html.blocks import Block, Figure, Fold, Report, Table, Verdicts
from harp.reports.html.collect import Run
from harp.reports.html.groups import NATURAL, Estimate, Runs, Variant
from harp.reports.html.network import Histogram

FORMAT = 2  # of the data
SIGNS = {"good": "✓ good", "look": "! look", "bad": "✗ bad"}


def page(report: Report) -> str:
    """The HTML file."""
    return templating.render(
        "report.html",
        report=report,
        style=Markup((templating.FOLDER / "style.css").read_text("utf-8")),
        signs=SIGNS,
        draw=lambda chart, title: Markup(plots.inline(chart, title)),
        swatch=lambda style, kind: Markup(plots.swatch(style, kind)),
        png=_png,
    )


def markdown(report: Report) -> str:
    """The same words and tables as Markdown, without the charts."""
    return templating.render("report.md", report=report, signs=SIGNS, fence=_fence)


def _png(image: NDArray[np.uint8]) -> str:
    """The address of an image that needs no file; in grey unless it has three channels."""
    from PIL import Image  # comes with matplotlib

    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0) if len(image) == 3 else image[0]).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _fence(code: str) -> str:
    """The line before and after code: longer than any run of backticks in it."""
    return "`" * max([3, *(len(run) + 1 for run in re.findall("`+", code))])


def data(
    report: Report, parts: Sequence[Runs], histograms: Sequence[Mapping[str, Sequence[Histogram]]]
) -> dict[str, Any]:
    """Everything on the page except the images: the records of all runs, how they are grouped, and every table."""
    return {
        "format": FORMAT,
        "harp": harp.__version__,
        "title": report.title,
        "subtitle": report.subtitle,
        "parts": [
            {
                "title": part.title,
                "subtitle": part.subtitle,
                "headline": part.headline,
                "warnings": [*part.warnings, *part.notes],
                "networks": [_network(variant, runs, measured) for variant in runs.variants],
                "sections": [
                    {"title": section.title, "tables": [table for block in section.blocks for table in _tables(block)]}
                    for section in part.sections
                ],
            }
            for part, runs, measured in zip(report.parts, parts, histograms, strict=True)
        ],
        "runs": [_run(run) for runs in parts for run in runs.all],
    }


def _network(variant: Variant, runs: Runs, histograms: Mapping[str, Sequence[Histogram]]) -> dict[str, Any]:
    return {
        "label": variant.label,
        "method": variant.method,
        "kind": variant.kind,
        "unit": variant.unit,
        "kept": variant.share,
        "remark": variant.remark or None,
        "seeds": [run.seed for run in variant.runs],
        "runs": [run.folder.name for run in variant.runs],
        "accuracy": [
            {"attack": key[0], "epsilon": key[1], "norm": key[2] or None}
            | {"before": _score(variant.before(key)), "after": _score(variant.after(key))}
            for key in (NATURAL, *runs.attacks)
        ],
        "weights": [asdict(one) for one in histograms.get(variant.label, [])],
    }


def _score(result: Estimate | None) -> dict[str, Any] | None:
    return None if result is None else asdict(result)


def _run(run: Run) -> dict[str, Any]:
    evaluation = []
    for record in run.records:
        # Without images, and without the list of images that were right: the files of the evaluation have them.
        images = {"items": {"__all__": {"image", "attacked"}}} if isinstance(record, Examples) else {}
        evaluation.append(record.model_dump(exclude={"images": True, **images}))
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
            return [{"title": block.title, "findings": block.rows}]
        case Fold():
            return [table for inner in block.blocks for table in _tables(inner)]
        case _:
            return []
