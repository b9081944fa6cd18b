"""The report's chapters on single images and on trust: changed answers, corruptions, attacked images, checks, files."""

import numpy as np

from harp.experiments.records import Checks, Corruptions, Deployed, Example, Examples, Flips, Trial
from harp.reports.html.accuracy import attack_text, epsilon_text, interval_text, per_cent, points_text
from harp.reports.html.blocks import (
    Attacked,
    Block,
    Fold,
    Gallery,
    Section,
    Table,
    Verdicts,
    figure,
    folded,
    section,
    words,
)
from harp.reports.html.collect import Run, pixels
from harp.reports.html.groups import Points, Runs, Variant
from harp.reports.plots import Chart
from harp.reports.tables import bytes_text

_FLIPS = 24  # shown of a network
_IMAGES = 12  # shown of a network
_BYTES = 600_000  # of all images together

_HOW = {
    "images": "the images as they are",
    "replayed": "found on the twin, replayed",
    "queries": "queries to the file itself",
    "union": "none of these fools it",
}


def flips(runs: Runs) -> Section | None:
    """The answers that pruning changed."""
    rows, tables = [], []
    first = {variant.label: (variant, run, flip) for variant, run, flip in reversed(runs.records(Flips))}
    for variant, run, flip in reversed(first.values()):
        counts = (flip.both_right, flip.lost, flip.won, flip.both_wrong, flip.changed)
        shares = (f"{count:,} ({100 * count / flip.n:.1f} %)" if flip.n else "–" for count in counts)
        rows.append([variant.label, f"{flip.n:,}", *shares])
        lines = [
            [str(one.index), *(runs.class_name(run, number) for number in (one.label, one.dense, one.pruned))]
            for one in flip.examples[:_FLIPS]
        ]
        if lines:
            tables.append(Table(["image", "truth", "dense says", "pruned says"], lines, variant.label, plain=True))
    if not rows:
        return None
    columns = ["network", "images", "right in both", "lost", "won", "wrong in both", "answer changed"]
    note = "Lost: the dense network was right and the pruned one is not; won: the other way round."
    blocks: list[Block] = [Table(columns, rows, "Before and after, image by image", note)]
    if tables:
        blocks.append(Fold("Images whose answer changed", folded(tables, "networks")))
    return section("flips", blocks)


def corruptions(runs: Runs) -> Section | None:
    """Accuracy under noise, blur, weather and the like."""
    by_severity = {variant.label: _corrupted(variant) for variant in runs.variants}
    variants = [variant for variant in runs.variants if by_severity[variant.label]]
    if not variants:
        return None
    cells = [key for variant in variants for key in by_severity[variant.label]]
    names, severities = list(dict.fromkeys(name for name, _ in cells)), sorted({severity for _, severity in cells})

    def means(variant: Variant) -> list[float | None]:
        columns = [[v for (n, _), v in by_severity[variant.label].items() if n == name] for name in names]
        return [sum(column) / len(column) if column else None for column in columns]

    def points(variant: Variant) -> Points:
        return range(len(names)), [None if mean is None else 100 * mean for mean in means(variant)], (), ()

    rows = [
        [variant.label, name, *(per_cent(by_severity[variant.label].get((name, severity))) for severity in severities)]
        for variant in variants
        for name in names
    ]
    chart = Chart("", "accuracy, mean of the severities (%)", "", [], names, "marks", unit=" %", whole=True)
    table = Table(["network", "corruption", *(f"severity {severity}" for severity in severities)], rows)
    known = [(variant.label, [mean for mean in means(variant) if mean is not None]) for variant in variants]
    overall = [[label, per_cent(sum(values) / len(values))] for label, values in known]
    blocks = [
        figure("corruptions", runs.charts(variants, points, chart), table),
        Table(["network", "accuracy"], overall, "Mean over all corruptions"),
    ]
    return section("corruptions", blocks)


def _corrupted(variant: Variant) -> dict[tuple[str, int], float]:
    """Accuracy by corruption and severity, the mean of the seeds."""
    values: dict[tuple[str, int], list[float]] = {}
    for row in (row for run in variant.runs for one in run.of(Corruptions) for row in one.rows):
        values.setdefault((row.corruption, row.severity), []).append(row.value)
    return {key: sum(seeds) / len(seeds) for key, seeds in values.items()}


def examples(runs: Runs) -> Section | None:
    """Images, the changes by an attack, and the answers of the network."""
    galleries: list[Gallery] = []
    left, skipped = _BYTES, 0
    for variant, run, record in runs.records(Examples):
        items = []
        for one in record.items[:_IMAGES]:
            shown = _attacked(runs, run, record, one)
            size = sum(image.size for image in shown.images)
            if size > left:
                skipped += 1
                continue
            left -= size
            items.append(shown)
        if items:
            epsilon = f", ε {epsilon_text(record.epsilon)}" if record.epsilon is not None else ""
            values = {"network": variant.label, "seed": run.seed, "attack": f"{record.attack}{epsilon}"}
            galleries.append(Gallery(*words("figures", "gallery", **values), items))
    more = f" {skipped} more were left out to keep the file small." if skipped else ""
    return section("examples", folded(galleries, "networks"), skipped=more)


def _attacked(runs: Runs, run: Run, record: Examples, one: Example) -> Attacked:
    what = f"{run.folder.name}: example {one.index}"
    image, attacked = (pixels(text, record.shape, what) for text in (one.image, one.attacked))
    change = attacked.astype(int) - image
    gain = max(1, 127 // max(1, int(abs(change).max())))
    label, before, after = (runs.class_name(run, number) for number in (one.label, one.before, one.after))
    images = (image, (128 + gain * change).clip(0, 255).astype(np.uint8), attacked)
    return Attacked(images, label, before, after, f"× {gain}", one.index)


def checks(runs: Runs) -> Section | None:
    """Checks for false robustness, and why each one is made."""
    lists: list[Verdicts] = []
    for variant, run, record in runs.records(Checks):
        verdicts = {finding.verdict for finding in record.findings}
        state = "failed" if "bad" in verdicts else "look at it" if "look" in verdicts else "all good"
        lists.append(Verdicts(f"{variant.label}, seed {run.seed}: {state}", record.findings))
    return section("checks", folded(lists, "networks"))


def deployment(runs: Runs) -> Section | None:
    """Accuracy in torch and as deployed, side by side."""
    records = [
        (variant.label if len(runs.all) == 1 else f"{variant.label}, seed {run.seed}", record)
        for variant in runs.variants
        for run in variant.runs
        for record in run.deployed
    ]
    if not records:
        return None
    rows = [[label, record.artefact.file, *_cells(test)] for label, record in records for test in record.tests]
    columns = ["network", "file", "test", "in torch", "as deployed", "95 % interval", "change", "images", "how"]
    note = (
        "Worst case: an image counts if neither what was found on the twin nor queries to the file fool it; in torch, "
        "without the queries. Change: as deployed against torch, in percentage points."
    )
    tables = [Table(columns, rows, "In torch and as deployed", note), _files(records)]
    verdicts = [
        Verdicts(f"{label}: {record.artefact.file}", record.checks) for label, record in records if record.checks
    ]
    return section("deployed", [*tables, *folded(verdicts, "files")])


def _cells(test: Trial) -> list[str]:
    inside, outside = test.torch, test.deployed
    # Worst cases are not compared: the queries are made to the file only.
    return [
        attack_text(outside.key),
        per_cent(None if inside is None else inside.value),
        per_cent(outside.value),
        interval_text(outside.low, outside.high),
        "–" if inside is None or test.how == "union" else points_text(outside.value - inside.value),
        f"{outside.n:,}",
        _HOW.get(test.how, test.how),
    ]


def _files(records: list[tuple[str, Deployed]]) -> Table:
    rows = []
    for label, record in records:
        file = record.artefact
        agreed = [
            f"{one.agree:,} of {one.n:,} with {one.other} (logits off by {one.difference:.2g})"
            for one in record.agreement
        ]
        runtime = ", ".join(f"{key} {value}" for key, value in file.runtime.items())
        twin = "none: black-box attacks only" if record.twin is None else record.twin.words
        rows.append([label, file.file, bytes_text(file.bytes), file.sha256, runtime, twin, "; ".join(agreed) or "–"])
    columns = ["network", "file", "size", "SHA-256", "computed by", "twin", "clean predictions that agree"]
    return Table(columns, rows, "The files", plain=True)
