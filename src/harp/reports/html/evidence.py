"""The report's chapters on single images and on trust: flips, corruptions, attacked images, checks."""

from collections.abc import Mapping

from harp.errors import RecipeError
from harp.experiments.records import Checks, Corruptions, Example, Examples, Flips
from harp.reports.html import chart, png, scale
from harp.reports.html.accuracy import epsilon_text, legend, per_cent
from harp.reports.html.blocks import (
    Attacked,
    Block,
    Figure,
    Fold,
    Gallery,
    Panel,
    Section,
    Table,
    Verdict,
    Verdicts,
    Words,
    folded,
)
from harp.reports.html.chart import Axis, Point, Series
from harp.reports.html.collect import Run, pixels
from harp.reports.html.groups import Runs, Variant

_MOST_FLIPS = 24
_MOST_PICTURES = 12  # of a network
_MOST_BYTES = 500_000  # of all pictures together, before base64

# Why a check is made, for those whose names we know; what a finding says itself is shown for all.
_WHY = {
    "prunable": "Only weights of layers that are found can be pruned and counted.",
    "inputs": "Epsilon is a share of the range from 0 to 1: on images of another range it means something else.",
    "normalisation": "Outside the model, a normalisation changes what epsilon means.",
    "logits": "Attacks follow the gradient of a loss of logits; after a softmax it vanishes.",
    "determinism": "An attack that meets other random numbers at every step fails for that reason alone.",
    "state": "If the answer depends on more than the image, an attack chases a target that moves.",
    "accuracy": "What is wrong already can't be attacked.",
    "gradients": "Where the gradient is zero, an attack by gradients is lost, and the network only looks robust.",
    "preprocessing": "Steps that the gradient does not see (rounding, compression) hide the way from the attack.",
    "ascent": "Following the gradient must make the loss larger, or the gradient leads nowhere.",
    "vanishing": "A very confident network has gradients that rounding swallows; another loss still finds them.",
    "steps": "If late steps still break images, the attack was stopped before its end.",
    "noise": "Random noise of the same size must be weaker than an attack.",
    "budget": "With perturbations almost without limit every network breaks: one that does not hides its gradient.",
    "epsilon": "A larger ε contains the smaller one: accuracy must not rise with it.",
    "order": "A stronger attack must not leave more images right than a weaker one.",
    "black box": "An attack that sees no gradients must not do better than one that does.",
    "transfer": "Images made for another network must not be stronger than those made for this one.",
    "re-evaluation": "What is counted during an attack must be found again afterwards, or the answers are random.",
}


def flips(runs: Runs) -> Section | None:
    """Which answers pruning changed."""
    found = []
    for variant in runs.led():
        found += [(variant, run, flip) for run in variant.runs for flip in run.of(Flips)][:1]
    if not found:
        return None
    rows = [
        [
            variant.label,
            f"{flip.n:,}",
            *(f"{count:,} ({100 * count / flip.n:.1f} %)" if flip.n else "–" for count in _counts(flip)),
        ]
        for variant, _, flip in found
    ]
    columns = ["network", "images", "right in both", "lost", "won", "wrong in both", "answer changed"]
    note = "Lost: the dense network was right and the pruned one is not; won: the other way round."
    blocks: list[Block] = [Table(columns, rows, "Before and after, image by image", note)]
    tables = []
    for variant, run, flip in found:
        if flip.examples:
            lines = [
                [str(one.index), *(runs.class_name(run, number) for number in (one.label, one.dense, one.pruned))]
                for one in flip.examples[:_MOST_FLIPS]
            ]
            tables.append(Table(["image", "truth", "dense says", "pruned says"], lines, variant.label, plain=True))
    if tables:
        blocks.append(Fold("Images whose answer changed", folded(tables, "networks")))
    lead = "Two networks of the same accuracy can be right on different images: what users notice are the answers lost."
    return Section("flips", "Flipped answers", lead, blocks)


def _counts(flip: Flips) -> tuple[int, ...]:
    return flip.both_right, flip.lost, flip.won, flip.both_wrong, flip.changed


def corruptions(runs: Runs) -> Section | None:
    """Accuracy under noise, blur, weather and the like."""
    found = [variant for variant in runs.variants if any(run.of(Corruptions) for run in variant.runs)]
    if not found:
        return None
    names = list(dict.fromkeys(name for variant in found for name in _corrupted(variant)))
    drawn = runs.panels(found)
    panels = []
    for title, lines in drawn:
        series = []
        for label, number, variant in lines:
            values = _corrupted(variant)
            points = [
                Point(row, 100 * values[name], text=f"{label}, {name}: {100 * values[name]:.1f} %")
                for row, name in enumerate(names)
                if name in values
            ]
            series.append(Series(label, number, points))
        axis = Axis("accuracy, mean of the severities (%)", scale.fit([0.0, 100.0], room=0.0))
        panels.append(Panel(chart.rows(f"Corruptions {title}", names, series, axis, joined=False), title))
    severities = sorted(
        {row.severity for v in found for run in v.runs for one in run.of(Corruptions) for row in one.rows}
    )
    rows = []
    for variant in found:
        cells = _cells(variant)
        rows += [
            [variant.label, name, *(per_cent(cells.get((name, severity))) for severity in severities)] for name in names
        ]
    columns = ["network", "corruption", *(f"severity {severity}" for severity in severities)]
    figure = Figure(
        "Accuracy under corruptions",
        "A row a corruption. Robustness against an attacker does not imply robustness against noise, blur or weather, "
        "and pruning can change one without the other.",
        panels,
        Table(columns, rows),
        legend(drawn, joined=False),
    )
    means = [[variant.label, per_cent(_mean(_corrupted(variant)))] for variant in found]
    table = Table(["network", "accuracy"], means, "Mean over all corruptions")
    lead = "What noise, blur and weather do to the networks, without an attacker."
    return Section("corruptions", "Corruptions", lead, [figure, table])


def _mean(values: Mapping[str, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


def _cells(variant: Variant) -> dict[tuple[str, int], float]:
    """Accuracy by corruption and severity, the mean of the seeds."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in variant.runs:
        for one in run.of(Corruptions):
            for row in one.rows:
                found.setdefault((row.corruption, row.severity), []).append(row.value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _corrupted(variant: Variant) -> dict[str, float]:
    """Accuracy by corruption, the mean of seeds and severities."""
    found: dict[str, list[float]] = {}
    for (name, _), value in _cells(variant).items():
        found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def examples(runs: Runs) -> Section | None:
    """Images, what an attack adds to them, and what the network then says."""
    galleries: list[Gallery] = []
    spent = left_out = 0
    for variant in runs.led():
        for run in variant.runs:
            for record in run.of(Examples):
                items = []
                for one in record.items[:_MOST_PICTURES]:
                    shown, size = _attacked(runs, run, record, one)
                    if spent + size > _MOST_BYTES:
                        left_out += 1
                        continue
                    spent += size
                    items.append(shown)
                if items:
                    epsilon = f", ε {epsilon_text(record.epsilon)}" if record.epsilon is not None else ""
                    title = f"{variant.label}, seed {run.seed}: {record.attack}{epsilon}"
                    caption = (
                        "Left the image, in the middle what the attack changed (amplified; grey is no change), right "
                        "the attacked image. Below: what the network says before and after."
                    )
                    galleries.append(Gallery(title, caption, items))
    if not galleries:
        return None
    blocks = folded(galleries, "networks")
    if left_out:
        blocks.append(Words(f"{left_out} more pictures were left out to keep the file small."))
    lead = "What ε means to the eye: the images as the network sees them."
    return Section("examples", "Attacked images", lead, blocks)


def _attacked(runs: Runs, run: Run, record: Examples, one: Example) -> tuple[Attacked, int]:
    what = f"{run.folder.name}: example {one.index}"
    image, attacked = (pixels(text, record.shape, what) for text in (one.image, one.attacked))
    change = [after - before for before, after in zip(image, attacked, strict=True)]
    most = max((abs(value) for value in change), default=0)
    gain = 127 // most if most else 1
    middle = bytes(128 + gain * value for value in change)
    pictures = [_picture(content, record.shape, what) for content in (image, middle, attacked)]
    left, centre, right = (png.uri(picture) for picture in pictures)
    truth, before, after = (runs.class_name(run, number) for number in (one.label, one.before, one.after))
    return Attacked(left, centre, right, truth, before, after, f"× {gain}", one.index), sum(map(len, pictures))


def _picture(content: bytes, shape: tuple[int, int, int], what: str) -> bytes:
    """A PNG of bytes that come channel after channel; in grey if the channels are not three."""
    channels, height, width = shape
    if min(shape) < 1:
        raise RecipeError(f"{what}: an image can't have the shape {shape}")
    area = height * width
    if channels != 3:
        return png.encode(content[:area], width, height, 1)
    pairs = zip(content[:area], content[area : 2 * area], content[2 * area :], strict=True)
    return png.encode(bytes(value for pixel in pairs for value in pixel), width, height, 3)


def checks(runs: Runs) -> Section | None:
    """Checks for false robustness, with why each one is made."""
    lists: list[Verdicts] = []
    for variant in runs.led():
        for run in variant.runs:
            for record in run.of(Checks):
                items = [Verdict(one.check, one.verdict, one.text, _WHY.get(one.check, "")) for one in record.findings]
                worst = [name for name in ("bad", "look") if any(item.verdict == name for item in items)]
                state = {"bad": "failed", "look": "look at it"}[worst[0]] if worst else "all good"
                lists.append(Verdicts(f"{variant.label}, seed {run.seed}: {state}", items))
    if not lists:
        return None
    lead = (
        "A high accuracy under attack can mean a robust network or an attack that failed. These checks look for the "
        "second; they can't prove the first."
    )
    return Section("checks", "Is the robustness real?", lead, folded(lists, "networks"))
