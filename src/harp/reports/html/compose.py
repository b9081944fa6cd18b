"""The report as a whole: a part for each data set and model, with a headline, warnings and chapters in order."""

from collections.abc import Mapping, Sequence

import harp
from harp.reports import tables
from harp.reports.html import accuracy, evidence, network, origin
from harp.reports.html.accuracy import attack_text, points_text
from harp.reports.html.blocks import Part, Report, Tile
from harp.reports.html.groups import NATURAL, Key, Runs, Variant
from harp.reports.html.network import Histogram
from harp.reports.tables import bytes_text, count_text


def compose(parts: Sequence[Runs], histograms: Sequence[Mapping[str, Sequence[Histogram]]]) -> Report:
    """A part for each data set and model; the histograms of each are by the label of the variant."""
    composed = [
        _part(runs, measured, f"part-{number}-" if len(parts) > 1 else "")
        for number, (runs, measured) in enumerate(zip(parts, histograms, strict=True), 1)
    ]
    count = sum(len(runs.all) for runs in parts)
    foot = f"Made by harp {harp.__version__} from {_count(count, 'run')}."
    if len(parts) == 1:
        return Report(composed[0].title, composed[0].subtitle, composed, foot)
    data, models = ({getattr(run, key) for runs in parts for run in runs.all} for key in ("data", "model"))
    title = f"{_count(len(models), 'model')} on {_count(len(data), 'data set')}"
    return Report(title, f"{count} runs; each data set and model has its own part", composed, foot)


def _part(runs: Runs, histograms: Mapping[str, Sequence[Histogram]], anchor: str) -> Part:
    sections = [
        accuracy.results(runs),
        evidence.deployment(runs),
        accuracy.curves(runs),
        evidence.checks(runs),
        accuracy.parts(runs),
        accuracy.classes(runs),
        evidence.examples(runs),
        network.layers(runs),
        network.weights(runs, histograms),
        network.learning(runs),
        evidence.flips(runs),
        evidence.corruptions(runs),
        network.cost(runs),
        origin.origin(runs),
    ]
    single, lead = len(runs.all) == 1, runs.lead
    return Part(
        anchor=anchor,
        title=f"{lead.label} – {runs.title}" if len(runs.variants) == 1 else f"{runs.title}: {_counted(runs)}",
        subtitle=_subtitle(runs),
        headline=_headline(runs, lead),
        tiles=_tiles(runs, lead),
        notes=origin.notes(runs, [v.label for v in runs.variants if not histograms.get(v.label)]),
        sections=[section for section in sections if section is not None],
        shown="" if single else _shown(runs, lead),
        warnings=origin.warnings(runs),
        line=_line(runs),
        failed=bool(lead.remark),
    )


def _line(runs: Runs) -> str:
    lead = runs.lead
    tested = [(key, lead.after(key)) for key in (NATURAL, runs.robust) if key is not None]
    cells = [f"{attack_text(key)} {result.text} %" for key, result in tested if result is not None]
    return f"{lead.label}: {', '.join(cells)}{f', {lead.remark}' if lead.remark else ''}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _counted(runs: Runs) -> str:
    budgets = len({variant.budget for variant in runs.pruned})
    counts = [(len(runs.methods), "method"), (budgets, "budget")]
    return ", ".join(_count(number, what) for number, what in counts if number) or "dense networks"


def _subtitle(runs: Runs) -> str:
    """The names of the recipes, or how many runs there are."""
    if len(runs.all) == 1:
        return f"{runs.all[0].summary.name}, seed {runs.lead.seeds}"
    return f"{_count(len(runs.all), 'run')}, {_count(len({run.seed for run in runs.all}), 'seed')}"


def _headline(runs: Runs, lead: Variant) -> str:
    run = lead.runs[0]
    if len(lead.runs) == 1:
        return tables.headline({**run.summary.model_dump(), "results": [one.model_dump() for one in run.results]})
    parts = [f"{lead.unit} {run.size:,} → {lead.share * run.size:,.0f} ({lead.share:.3%})"]
    for key in (NATURAL, *runs.attacks):
        before, after = lead.before(key), lead.after(key)
        if after:
            parts.append(f"{key[0]} {f'{before.value:.1%} → ' if before else ''}{after.value:.1%}")
    return ", ".join(parts) + f" (means of {len(lead.runs)} seeds)"


def _shown(runs: Runs, lead: Variant) -> str:
    rivals = [variant for variant in runs.pruned if variant.budget == lead.budget]
    over = f", mean of {len(lead.runs)} seeds" if len(lead.runs) > 1 else ""
    best = f", the best of {len(rivals)} at the smallest budget" if len(rivals) > 1 else ""
    return f"{lead.label}{best}{over}"


def _tiles(runs: Runs, lead: Variant) -> list[Tile]:
    run = lead.runs[0]
    tiles = [Tile(f"{run.unit} kept", f"{100 * run.kept / run.size:.3g} %", "", f"{run.kept:,} of {run.size:,}")]
    tests: list[tuple[str, Key]] = [("natural accuracy", NATURAL)]
    if runs.robust is not None:
        # If the dense network was not tested under the strongest attack, also one that it was tested under.
        compared = [key for key in runs.attacks if lead.before(key) and lead.after(key)]
        shown = [runs.robust] if runs.robust in compared or not compared else [compared[-1], runs.robust]
        tests += [(f"under {attack_text(key)}", key) for key in shown]
    for title, key in tests:
        before, after = lead.before(key), lead.after(key)
        if after:
            change = f"{points_text(after.value - before.value)} points, " if before else ""
            text = f"{change}95 %: {100 * after.low:.1f}–{100 * after.high:.1f}"
            tiles.append(
                Tile(
                    title,
                    f"{100 * after.value:.1f} %",
                    f"{100 * before.value:.1f} %" if before else "",
                    f"{text}; {lead.remark}" if lead.remark else text,
                    bad=bool(lead.remark),
                )
            )
    cost = run.summary.cost
    if cost is None:
        return tiles
    channels = run.kind == "channels"
    smaller = "times smaller" if channels else "times smaller (estimate)"
    counts = [("multiplications (MACs)", cost.macs, cost.macs_kept, count_text, "times fewer")]
    if channels and cost.parameters_kept:
        counts.append(("parameters", cost.parameters, cost.parameters_kept, count_text, "times fewer"))
    if cost.bytes_sparse:
        counts.append(("size of the weights", cost.bytes_dense, cost.bytes_sparse, bytes_text, smaller))
    for title, whole, kept, text_of, times in counts:
        if whole and kept is not None:
            tiles.append(Tile(title, text_of(kept), text_of(whole), f"{whole / kept:.3g} {times}" if kept else ""))
    return tiles
