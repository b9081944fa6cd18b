"""`harp.plot`: the picture of a result, for notebooks and files."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harp.errors import MissingExtra, RecipeError
from harp.evaluation.score import Score
from harp.experiments import run_folder
from harp.experiments.plan import Spread
from harp.experiments.run import Outcome
from harp.experiments.run_folder import Finished, LoadedRun
from harp.experiments.table import Results
from harp.reports import names, plots
from harp.reports.plots import Chart, Series
from harp.training.loop import Fitted


@dataclass(frozen=True)
class Picture:
    """Charts that a notebook shows; the numbers as text where matplotlib is missing.

    Arguments:
        title: above the charts.
        charts: what is drawn.
        failed: whether the network is at chance level or far below the dense one.

    Example:
        picture = harp.plot(harp.accuracy(model, images, labels))
        picture.save("classes.png")
    """

    title: str
    charts: Sequence[Chart]
    failed: bool = False

    def figure(self) -> Any:
        """The picture as a figure of matplotlib."""
        return plots.picture(self.title, self.charts, self.failed)

    def save(self, path: str | Path) -> Path:
        """Write it to a file, such as x.png, x.svg or x.pdf."""
        return plots.save(self.figure(), Path(path))

    def _repr_png_(self) -> bytes | None:
        file = io.BytesIO()
        try:
            plots.write(self.figure(), file, "png")
        except MissingExtra:
            return None  # a notebook shows the text then
        return file.getvalue()

    def __repr__(self) -> str:
        lines = [self.title]
        for chart in self.charts:
            for series in chart.series:
                places = chart.rows or [f"{x:g}" for x in series.x]
                values = zip(places, series.y, strict=False)
                texts = [f"{place} = {value:.4g}{chart.unit}" for place, value in values if value is not None]
                lines.append(f"{series.name}: {', '.join(texts)}")
        return "\n".join(lines)


def plot(result: object) -> Picture:
    """The picture of a result: shown by a notebook, or saved to a file.

    Arguments:
        result: a `harp.Score`, a `harp.Fitted`, a run (`harp.load_run`, the outcome of `harp.Run`, or its folder), how
            a budget is spread over layers, or the results of a comparison.

    Example:
        harp.plot(harp.accuracy(model, images, labels)).save("classes.png")
    """
    match result:
        case Score():
            return _score(result)
        case Fitted():
            return _training("training", {"": result.history}, [result.epoch - 1])
        case Spread():
            return Picture("what each layer keeps", [plots.layers(result, "weights")])
        case Results():
            return Picture(*plots.study(result))
        case LoadedRun():
            return _run(result.finished)
        case Outcome():
            return _run(run_folder.read(result.folder))
        case str() | Path():
            return _run(run_folder.read(result))
    raise RecipeError(f"can't plot a {type(result).__name__}: give a Score, a Fitted, a run or a comparison's results")


def _score(score: Score) -> Picture:
    classes = range(len(score.totals))
    series = Series(
        score.name,
        1,
        classes,
        [100 * share if n else None for share, n in zip(score.per_class, score.totals, strict=True)],
    )
    low, high = score.interval()
    title = f"{score.name}: {score.accuracy:.1%} of {score.n:,} images (95 %: {low:.1%} – {high:.1%})"
    rows = [f"class {number}" for number in classes]
    return Picture(title, [Chart("", "accuracy (%)", "", [series], rows, "bars", unit=" %", whole=True)])


def _training(title: str, stages: Mapping[str, Sequence[Mapping[str, Any]]], chosen: Sequence[int] = ()) -> Picture:
    charts = [plots.training(list(stages.items()), chosen)]
    records = [record for history in stages.values() for record in history]
    losses = [float(record["loss"]) if "loss" in record else None for record in records]
    loss = Series("loss", 2, range(1, len(records) + 1), losses)
    charts.append(Chart("", "epoch", "training loss", [loss], marked=len(records) <= 30, stages=charts[0].stages))
    return Picture(title, [chart for chart in charts if chart.series])


def _run(run: Finished) -> Picture:
    kind = run_folder.budget_of(run.summary)["kind"]
    stages = {stage.facts["stage"]: stage.facts.get("history", []) for stage in run.stages if stage.facts}
    charts = [plots.layers(run.summary["layers"], kind), plots.training(list(stages.items()))]
    title = "\n".join([names.run(run.recipe), *run.warnings])
    return Picture(title, [chart for chart in charts if chart.series], bool(run.warnings))
