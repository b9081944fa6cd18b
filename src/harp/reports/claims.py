"""A claim of the paper as its table, its figure and a part of the evidence page: the published numbers beside ours."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harp.errors import MissingExtra
from harp.experiments.reproduction import judge
from harp.experiments.reproduction.claim import SOURCES, Cell, Claim
from harp.experiments.reproduction.evidence import Evidence
from harp.experiments.reproduction.verdict import BAD, GOOD, Measured, State
from harp.system import files

_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_SIGNS = {**dict.fromkeys(GOOD, "✓"), **dict.fromkeys(BAD, "✗"), State.OPEN: "?"}
Row = list[str]


def tables(claim: Claim, evidence: Evidence | None, *, small: bool) -> dict[str, list[Row]]:
    """A table for each experiment: a row a method, a column a measure and share; the first row is the head.

    A cell is `published | ours`, or only one of them where the other is not known.
    """
    variant = claim.small if small else claim.full
    return {
        name: rows
        for name in (variant.experiments if variant else {})
        if len(rows := _table(name, claim, evidence, small=small)) > 1
    }


def _table(name: str, claim: Claim, evidence: Evidence | None, *, small: bool) -> list[Row]:
    published = {} if small else {cell: value for cell, value in claim.cells.items() if cell.experiment == name}
    ours = _measured_cells(name, evidence)
    cells = [*published, *ours]
    measures = list(dict.fromkeys(cell.measure for cell in cells))
    shares: list[float | None] = [*sorted({cell.keep for cell in cells if cell.keep is not None}, reverse=True)]
    shares = shares or [None]
    columns = [(measure, share) for measure in measures for share in shares]
    head = [
        "method",
        *(measure if share is None else f"{measure} at {100 * share:.6g} %" for measure, share in columns),
    ]
    rows = [head]
    for method in dict.fromkeys(cell.method for cell in cells):
        row = [method]
        for measure, share in columns:
            candidates = (Cell(name, measure, method, share), Cell(name, measure, method, None))
            cell = next((cell for cell in candidates if cell in published or cell in ours), None)
            row.append("–" if cell is None else _cell(published.get(cell), ours.get(cell)))
        rows.append(row)
    return rows


def _measured_cells(name: str, evidence: Evidence | None) -> dict[Cell, Measured]:
    cells = {
        Cell(name, measure, record.method, record.keep): None
        for record in (evidence.records if evidence else ())
        if record.experiment == name
        for measure in record.values
    }
    return {cell: measured for cell in cells if evidence and (measured := evidence.measured(cell)) is not None}


def _cell(published: float | None, ours: Measured | None) -> str:
    found = "" if ours is None else f"{ours.mean:.1f} ± {(ours.high - ours.low) / 2:.1f}"
    return " | ".join(text for text in ("" if published is None else f"{published:g}", found) if text)


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(text.replace("|", "/") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def latex(rows: Sequence[Row]) -> str:
    """Rows as a LaTeX table (booktabs)."""
    escaped = [[_escape(text) for text in row] for row in rows]
    lines = [" & ".join(row) + r" \\" for row in escaped]
    columns = "l" + "r" * (len(rows[0]) - 1)
    return (
        "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
        + "\n\\end{tabular}\n"
    )


def _escape(text: str) -> str:
    for letter in "&%_#":
        text = text.replace(letter, f"\\{letter}")
    return text.replace("±", r"$\pm$").replace("–", "--").replace(" | ", " / ")


def as_csv(claim: Claim, evidence: Evidence | None, *, small: bool) -> str:
    """Every number of a claim, one a row: published, our mean with its 95 % interval, seeds, images of one seed."""
    variant = claim.small if small else claim.full
    published = {} if small else claim.cells
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*Cell._fields, "published", "mean", "low", "high", "seeds", "images"])
    for name in variant.experiments if variant else ():
        ours = _measured_cells(name, evidence)
        for cell in dict.fromkeys([*(cell for cell in published if cell.experiment == name), *ours]):
            found = ours.get(cell)
            numbers = (found.mean, found.low, found.high, found.seeds, found.images) if found else ("",) * 5
            writer.writerow([*cell, published.get(cell, ""), *numbers])
    return buffer.getvalue()


def write(folder: Path, claim: Claim, evidence: Evidence, *, small: bool) -> list[Path]:
    """Write evidence.json, table.md, table.tex, table.csv, and figure.svg and figure.png if matplotlib is there."""
    found = tables(claim, evidence, small=small)
    texts = {
        "table.md": "\n".join(f"## {name}\n\n{markdown(rows)}" for name, rows in found.items()),
        "table.tex": "\n".join(f"% {name}\n{latex(rows)}" for name, rows in found.items()),
        "table.csv": as_csv(claim, evidence, small=small),
    }
    for name, text in texts.items():
        files.write_text(folder / name, text)
    evidence.write(folder / "evidence.json")
    paths = [folder / name for name in ("evidence.json", *texts)]
    for suffix in ("svg", "png"):
        try:
            draw(folder / f"figure.{suffix}", claim, evidence, small=small)
        except MissingExtra:
            break
        paths.append(folder / f"figure.{suffix}")
    return paths


def draw(path: Path, claim: Claim, evidence: Evidence | None, *, small: bool) -> None:
    """Draw a panel for each experiment, and one for each published curve; published values are faint."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('pictures need matplotlib: pip install "harp-prune[report]"') from error
    variant = claim.small if small else claim.full
    panels = list(variant.experiments if variant else {})
    curves = {} if small else claim.series
    count = max(1, len(panels) + len(curves))
    columns = min(3, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * lines + 0.6), layout="constrained")
    figure.suptitle(f"{claim.place}: {claim.title}" + (" (small variant)" if small else ""), fontsize=10)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, name in zip(axes, panels, strict=False):
        _panel(axis, name, claim, evidence, small=small)
    for axis, (name, series) in zip(axes[len(panels) :], curves.items(), strict=False):
        _curves(axis, name, series)
    for axis in axes[len(panels) + len(curves) :]:
        axis.set_axis_off()
    with files.atomic(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=130)


def _panel(axis: Any, name: str, claim: Claim, evidence: Evidence | None, *, small: bool) -> None:
    """Accuracy over what is kept, sparse on the right: natural solid, attacks dashed, the dense network a line."""
    published = {} if small else {cell: value for cell, value in claim.cells.items() if cell.experiment == name}
    ours = _measured_cells(name, evidence)
    accuracies = [cell for cell in (*published, *ours) if cell.measure not in _NO_ACCURACIES]
    cells = accuracies or [*published, *ours]
    methods = list(dict.fromkeys(cell.method for cell in cells if cell.keep is not None))
    measures = list(dict.fromkeys(cell.measure for cell in cells))
    shares = sorted({cell.keep for cell in cells if cell.keep is not None}, reverse=True)
    for number, method in enumerate(methods):
        for measure in measures:
            look: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "marker": "o", "markersize": 4}
            look["linestyle"] = "-" if measure == measures[0] else "--"
            line = [Cell(name, measure, method, share) for share in shares]
            label = method if measure == measures[0] else None
            old = [(cell.keep, published[cell]) for cell in line if cell in published]
            if old:
                axis.plot(*zip(*old, strict=True), **look, alpha=0.35, fillstyle="none", label=label)
            new = [(cell.keep, ours[cell]) for cell in line if cell in ours]
            if new:
                means = [value.mean for _, value in new]
                halves = [(value.high - value.low) / 2 for _, value in new]
                where = [share for share, _ in new]
                axis.errorbar(where, means, halves, **look, capsize=2, label=None if old else label)
    for cell in (cell for cell in cells if cell.keep is None):
        value = ours[cell].mean if cell in ours else published[cell]
        axis.axhline(value, color="#999999", linestyle="-" if cell.measure == measures[0] else "--", linewidth=0.8)
    if shares:
        axis.set_xscale("log")
        axis.set_xticks(shares, [f"{100 * (1 - share):.6g} %" for share in shares], fontsize=6, rotation=30)
        axis.minorticks_off()
        axis.invert_xaxis()
    axis.set_xlabel("sparsity", fontsize=8)
    axis.set_ylabel("accuracy (%)" if accuracies else "%", fontsize=8)
    dashed = f", {' and '.join(measures[1:])} (dashed)" if len(measures) > 1 else ""
    axis.set_title(f"{name}: {' '.join(measures[:1])}{dashed}", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(linewidth=0.3)
    if methods:
        axis.legend(fontsize=6, frameon=False)


_NO_ACCURACIES = ("kept first", "kept last", "middle magnitude")


def _curves(axis: Any, name: str, series: Mapping[str, Sequence[float]]) -> None:
    for number, (method, values) in enumerate(series.items()):
        start = 0 if "epoch" in name and len(values) == 21 else 1
        axis.plot(
            range(start, start + len(values)), values, color=_COLOURS[number % len(_COLOURS)], alpha=0.6, label=method
        )
    if "share" in name or "weights" in name:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda *_: "")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"published: {name}", fontsize=8)
    axis.set_xlabel("layer" if "layer" in name else "epoch", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(linewidth=0.3)
    axis.legend(fontsize=6, frameon=False)


_HEAD = """# Evidence

Every table and figure of the HARP paper, what it claims, and what we found. This page is generated from the claims and
the evidence that come with the package (`scripts/make-evidence-page`), and a test keeps it up to date.

- **reproduced**: the 95 % interval of our mean lies within the tolerance of the published value.
- **order holds**, **order contradicted**: the paired 95 % interval of the difference over seeds is above or below zero.
- **differs**: our interval and the tolerance do not overlap.
- **open**: anything between, with the seeds that would decide. **not run**: there are no runs yet.

A small variant uses another data set and network. It can show that an order holds there, not that a number is
reproduced. Tolerances, seeds and experiments are in the files of the claims, in
`src/harp/experiments/reproduction/claims`. They are fixed before anything runs; where runs are older than the claim,
its departures say so.

`harp reproduce CLAIM` runs the paper's own experiment, which takes GPUs; `harp reproduce CLAIM --small` runs the small
one. To hand in full-scale results, add `--bundle FILE` and open a pull request with the file: `harp reproduce CLAIM
--check FILE` checks and judges it.

| claim | place | published values | full | small variant |
|---|---|---|---|---|"""


def page(claims: Iterable[Claim], shipped: Mapping[tuple[str, bool], Evidence | None]) -> str:
    """The evidence page in Markdown: every claim with its verdict, failures as visible as successes."""
    listed = list(claims)
    lines = [_HEAD]
    for claim in listed:
        verdicts = [judge.overall(claim, shipped.get((claim.id, small)), small=small) for small in (False, True)]
        texts = [str(verdict).replace(verdict.state, _signed(verdict.state), 1) for verdict in verdicts]
        link = f"[{claim.id}](#{claim.id})"
        lines.append(f"| {link} | {claim.place} | {SOURCES[claim.source]} | {texts[0]} | {texts[1]} |")
    for claim in listed:
        lines += ["", f"## {claim.id}", "", f"{claim.place}, `{'`, `'.join(claim.labels)}`: {claim.title}.", ""]
        lines += [f"**Claim.** {claim.says}", ""]
        lines += [f"- {text}" for text in (*claim.notes, *(f"Departure: {text}" for text in claim.departures))]
        for small in (False, True):
            lines += _part(claim, shipped.get((claim.id, small)), small=small)
    return "\n".join(lines).rstrip() + "\n"


def _part(claim: Claim, evidence: Evidence | None, *, small: bool) -> list[str]:
    """What a variant showed, with where and when."""
    variant = claim.small if small else claim.full
    if variant is None:
        return []
    computed = [] if small else judge.computed(claim)
    orders = judge.orders(variant.orders, evidence) if evidence else []
    lines = ["", f"**Small variant.** {variant.says}"] if small else []
    if evidence is not None:
        versions = evidence.records[0].versions if evidence.records else {}
        seeds = sorted({record.seed for record in evidence.records})
        seconds = sum(record.seconds for record in evidence.records)
        lines += [
            "",
            f"{len(evidence.records)} runs, seeds {_ranges(seeds)}, {seconds / 3600:.1f} hours of training; "
            f"{evidence.date}, harp {evidence.harp}{' at ' * bool(evidence.commit)}{evidence.commit}, "
            f"torch {versions.get('torch', '?')}, {evidence.machine}.",
        ]
        for name, rows in tables(claim, evidence, small=small).items():
            lines += ["", f"{name}:", "", markdown(_without_other_measures(rows)).rstrip()]
    elif small:
        lines += ["", "Not run."]
    judged = [*orders, *computed]
    if judged:
        lines += ["", "| what | published | ours | verdict |", "|---|---|---|---|"]
        lines += [
            f"| {line.what} | {line.published} | {line.ours} | {_signed(line.verdict.state)} |" for line in judged
        ]
    return lines


def _signed(state: State) -> str:
    return f"{_SIGNS.get(state, '')} {state}".strip()


def _without_other_measures(rows: Sequence[Row]) -> list[Row]:
    """Accuracies on the test set only; where there are none, all columns."""
    kept = [index for index, title in enumerate(rows[0]) if not title.startswith(("kept ", "middle ", "pruned "))]
    return [[row[index] for index in kept] for row in rows] if len(kept) > 1 else list(rows)


def _ranges(seeds: Sequence[int]) -> str:
    """Sorted numbers as text: 1 to 3, 7."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
