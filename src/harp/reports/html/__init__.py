"""`harp report`: what some runs came to, on one page that can be sent, opened and printed anywhere.

collect   run folders -> checked records, without paths of the machine
groups    which runs differ in the seed only, which are one method at several budgets
accuracy, deployment, network, evidence, origin   records -> chapters: tables, figures, words
compose   chapters -> a report
page, text, data   a report -> HTML, Markdown, JSON
chart, scale, png  SVG and PNG, written here: no plotting library, no script
"""

from collections.abc import Sequence
from pathlib import Path

from harp.errors import RecipeError
from harp.reports.html import collect, compose, data, groups, page, text
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
    arranged = groups.arrange(collect.read(runs))
    histograms = compose.measure_weights(arranged)
    report = compose.compose(arranged, histograms)
    texts = {"html": page.render(report), "md": text.render(report)}
    records = data.content(report, arranged, histograms)
    stem = out.with_suffix("") if out.suffix.removeprefix(".") in FORMATS and not out.is_dir() else out / "report"
    made = {name: stem.with_name(f"{stem.name}.{name}") for name in formats}
    for name, path in made.items():
        if name == "json":
            files.write_json(path, records)
        else:
            files.write_text(path, texts[name])
    return list(made.values())
