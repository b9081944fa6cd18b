"""The report as a whole: the headline, what to be warned of, and the chapters in order."""

import harp
from harp.reports import tables
from harp.reports.html import accuracy, deployment, evidence, network, origin
from harp.reports.html.accuracy import attack_text
from harp.reports.html.blocks import Report, Tile
from harp.reports.html.collect import Run
from harp.reports.html.groups import NATURAL, Key, Runs, Variant
from harp.reports.html.histograms import Histogram, histograms
from harp.reports.html.network import bytes_text, count_text


def compose(runs: Runs, histograms: dict[str, list[Histogram]]) -> Report:
    """All chapters that there is something to say in."""
    lead = runs.lead
    without = [variant.label for variant in runs.variants if not histograms.get(variant.label)]
    sections = [
        accuracy.results(runs),
        accuracy.sparsity(runs),
        deployment.deployment(runs),
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
    single = len(runs.all) == 1
    return Report(
        title=runs.all[0].name if single else _name(runs),
        subtitle=_subtitle(runs),
        headline=_headline(lead.runs[0]) if len(lead.runs) == 1 else _means(runs, lead),
        tiles=_tiles(runs, lead),
        notes=[*deployment.warnings(runs), *origin.notes(runs, without)],
        sections=[section for section in sections if section is not None],
        foot=f"Made by harp {harp.__version__} from {_count(len(runs.all), 'run')}.",
        shown="" if single else _shown(runs, lead),
        warnings=origin.warnings(runs),
    )


def measure_weights(runs: Runs) -> dict[str, list[Histogram]]:
    """The distributions of the weights of every variant's first seed, by label."""
    return {variant.label: histograms(variant.runs[0]) for variant in runs.variants}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _name(runs: Runs) -> str:
    first, *others = [run.name.split("-") for run in runs.all]
    same = [word for place, word in enumerate(first) if all(name[: place + 1] == first[: place + 1] for name in others)]
    return "-".join(same) or "Comparison of runs"


def _subtitle(runs: Runs) -> str:
    def told(part: str) -> str:
        found = dict.fromkeys(_part(run, part) for run in runs.all)
        return " / ".join(name for name in found if name)

    words = [" on ".join(name for name in (told("model"), told("data")) if name)]
    if len(runs.all) > 1:
        seeds = len({run.seed for run in runs.all})
        budgets = len({variant.budget for variant in runs.pruned})
        counts = [(len(runs.all), "run"), (len(runs.methods), "method"), (budgets, "budget"), (seeds, "seed")]
        words.append(", ".join(_count(number, what) for number, what in counts if number))
    else:
        words.append(f"{runs.lead.label}, seed {runs.lead.seeds}")
    return " · ".join(word for word in words if word)


def _part(run: Run, part: str) -> str:
    content = run.recipe.get(part)
    name = content.get("name") if isinstance(content, dict) else content
    return str(name) if name else ""


def _headline(run: Run) -> str:
    return tables.headline({**run.summary.model_dump(), "results": [one.model_dump() for one in run.results]})


def _means(runs: Runs, lead: Variant) -> str:
    size = lead.runs[0].size
    parts = [f"{lead.unit} {size:,} → {lead.share * size:,.0f} ({lead.share:.3%})"]
    for key in [NATURAL, *runs.attacks]:
        before, after = lead.before(key), lead.after(key)
        if after:
            old = f"{before.value:.1%} → " if before else ""
            parts.append(f"{key[0]} {old}{after.value:.1%}")
    return ", ".join(parts) + f" (means of {len(lead.runs)} seeds)"


def _shown(runs: Runs, lead: Variant) -> str:
    rivals = [variant for variant in runs.pruned if variant.budget == lead.budget]
    over = f", mean of {len(lead.runs)} seeds" if len(lead.runs) > 1 else ""
    best = f", the best of {len(rivals)} at the smallest budget" if len(rivals) > 1 else ""
    return f"{lead.label}{best}{over}"


def _tiles(runs: Runs, lead: Variant) -> list[Tile]:
    run = lead.runs[0]
    share = 100 * run.kept / run.size
    tiles = [Tile(f"{run.unit} kept", f"{share:.3g} %", "", f"{run.kept:,} of {run.size:,}")]
    tests: list[tuple[str, Key]] = [("natural accuracy", NATURAL)]
    if runs.robust is not None:
        # An attack that the dense network was tested under as well, where the strongest one was not its test.
        compared = [key for key in runs.attacks if lead.before(key) and lead.after(key)]
        shown = [runs.robust] if runs.robust in compared or not compared else [compared[-1], runs.robust]
        tests += [(f"under {attack_text(key)}", key) for key in shown]
    for title, key in tests:
        before, after = lead.before(key), lead.after(key)
        if after:
            old = f"{100 * before.value:.1f} %" if before else ""
            change = f"{100 * (after.value - before.value):+.1f} points, ".replace("-", "−") if before else ""
            text = f"{change}95 %: {100 * after.low:.1f}–{100 * after.high:.1f}"
            tiles.append(Tile(title, f"{100 * after.value:.1f} %", old, text))
    cost = run.summary.cost
    if cost and cost.macs and cost.macs_kept is not None:
        times = f"{cost.macs / cost.macs_kept:.3g} times fewer" if cost.macs_kept else ""
        tiles.append(Tile("multiplications (MACs)", count_text(cost.macs_kept), count_text(cost.macs), times))
    if run.kind == "channels" and cost and cost.parameters and cost.parameters_kept:
        times = f"{cost.parameters / cost.parameters_kept:.3g} times fewer"
        tiles.append(Tile("parameters", count_text(cost.parameters_kept), count_text(cost.parameters), times))
    if cost and cost.bytes_dense and cost.bytes_sparse:
        estimated = "" if run.kind == "channels" else " (estimate)"
        times = f"{cost.bytes_dense / cost.bytes_sparse:.3g} times smaller{estimated}"
        tiles.append(
            Tile(
                "size of the weights",
                bytes_text(cost.bytes_sparse),
                bytes_text(cost.bytes_dense),
                times,
            )
        )
    return tiles
