"""The report's chapter on files: what the networks do as they are deployed."""

from harp.experiments.records import Deployed, Trial
from harp.reports.html.accuracy import attack_text, per_cent
from harp.reports.html.blocks import Block, Section, Table, Verdict, Verdicts, folded
from harp.reports.html.groups import Runs
from harp.reports.html.network import bytes_text

_HOW = {
    "images": "the images as they are",
    "replayed": "found on the twin, replayed",
    "queries": "asked of the file itself",
    "union": "nothing of that fools it",
}
_WHY = "The file is what users get: if it is not the network that was measured, its numbers are others."


def deployment(runs: Runs) -> Section | None:
    """Accuracy in torch and as deployed, side by side."""
    found = [
        (_name(runs, variant.label, run.seed), record)
        for variant in runs.variants
        for run in variant.runs
        for record in run.deployed
    ]
    if not found:
        return None
    rows = [[label, record.artefact.file, *_cells(test)] for label, record in found for test in record.tests]
    columns = ["network", "file", "test", "in torch", "as deployed", "95 % interval", "change", "images", "how"]
    note = (
        "Worst case: an image counts if neither what was found on the twin nor queries to the file fool it; in torch, "
        "without the queries. Change: as deployed against torch, in points."
    )
    blocks: list[Block] = [Table(columns, rows, "In torch and as deployed", note), _files(found)]
    verdicts = [
        Verdicts(
            f"{label}: {record.artefact.file}",
            [
                Verdict(one.check, one.verdict, one.text, _WHY if one.check == "agreement" else "")
                for one in record.checks
            ],
        )
        for label, record in found
        if record.checks
    ]
    lead = (
        "The networks as files, attacked as they are. Attacks that need gradients are made on a twin in torch and "
        "replayed on the file; attacks by queries ask the file itself."
    )
    return Section("deployed", "As deployed", lead, [*blocks, *folded(verdicts, "files")])


def warnings(runs: Runs) -> list[str]:
    """Files that are not what they are taken for."""
    found = []
    for variant in runs.variants:
        for run in variant.runs:
            for record in run.deployed:
                bad = dict.fromkeys(one.check for one in record.checks if one.verdict == "bad")
                if bad:
                    name = f"{variant.label}, {record.artefact.file}"
                    found.append(f"{name}: a check of the deployed file failed ({', '.join(bad)}); see below.")
    return found


def _name(runs: Runs, label: str, seed: int) -> str:
    return label if len(runs.all) == 1 else f"{label}, seed {seed}"


def _cells(test: Trial) -> list[str]:
    inside, outside = test.torch, test.deployed
    change = "–"
    if inside is not None and test.how != "union":  # that has the queries as well, which are made to the file only
        change = f"{100 * (outside.value - inside.value):+.1f}".replace("-", "−")
    return [
        attack_text(outside.key),
        per_cent(None if inside is None else inside.value),
        per_cent(outside.value),
        f"{100 * outside.low:.1f} – {100 * outside.high:.1f} %",
        change,
        f"{outside.n:,}",
        _HOW.get(test.how, test.how),
    ]


def _files(found: list[tuple[str, Deployed]]) -> Table:
    rows = []
    for label, record in found:
        file = record.artefact
        agreed = [
            f"{each.agree:,} of {each.n:,} with {each.other} (logits off by {each.difference:.2g})"
            for each in record.agreement
        ]
        runtime = ", ".join(f"{key} {value}" for key, value in file.runtime.items())
        twin = "none: black-box attacks only" if record.twin is None else record.twin.words
        rows.append([label, file.file, bytes_text(file.bytes), file.sha256, runtime, twin, "; ".join(agreed) or "–"])
    columns = ["network", "file", "size", "SHA-256", "computed by", "twin", "clean predictions that agree"]
    return Table(columns, rows, "The files", plain=True)
