"""`harp report`: a report on some runs as one page that can be sent, opened and printed anywhere.

collect   run folders -> checked records, without paths of the machine
groups    which runs are of one data set and model, which differ only in the seed
accuracy, network, evidence, origin   records -> chapters: tables, figures, words
compose   chapters -> a report
render    a report -> HTML, Markdown, JSON; `harp.reports.plots` draws the charts
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harp.errors import RecipeError
from harp.reports.html import collect, compose, groups, network, render
from harp.system import files

__all__ = ["FORMATS", "build"]

FORMATS = ("html", "json", "md")


def build(runs: Sequence[Path], out: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a report on run folders and return the files, in the order of the formats.

    `out` is a file (`x.html`: the others are `x.json` and `x.md` beside it) or a folder, which gets `report.html` and
    so on. Everything is read, checked and rendered before the first file is written; each is written whole or not at
    all.
    """
    for name in formats:
        if name not in FORMATS:
            raise RecipeError(f"format {name!r}: a report can be {', '.join(FORMATS)}")
    if not formats:
        raise RecipeError(f"no format: a report can be {', '.join(FORMATS)}")
    parts = groups.parts(collect.read(runs))
    histograms = [{one.label: network.histograms(one.runs[0]) for one in part.variants} for part in parts]
    report = compose.compose(parts, histograms)
    contents: dict[str, Any] = {"json": render.data(report, parts, histograms), "md": render.markdown(report)}
    if "html" in formats:  # needs matplotlib
        contents["html"] = render.page(report)
    stem = out.with_suffix("") if out.suffix.removeprefix(".") in FORMATS and not out.is_dir() else out / "report"
    paths = {name: stem.with_name(f"{stem.name}.{name}") for name in formats}
    for name, path in paths.items():
        if name == "json":
            files.write_json(path, contents[name])
        else:
            files.write_text(path, contents[name])
    return list(paths.values())
