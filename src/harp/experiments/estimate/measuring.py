"""One stage of a recipe in a process of its own: a few real steps on noise, and what they take.

`python -m harp.experiments.estimate.measuring` reads what to measure as JSON from standard input and prints what it
found as JSON. A `harp.experiments.run.Run` does the stage, on images of noise and in a temporary folder: the same loop,
pruner, objective, validation and files as later. The stages before it are done with no epochs, and one that prunes by
magnitude, so that there are masks to keep.

A process of its own, so that the peak memory is that of the stage alone.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harp.evaluation import runner
from harp.experiments import build, recipe
from harp.experiments.estimate.attacking import seconds_an_image
from harp.experiments.estimate.known import Sizes
from harp.experiments.estimate.trial import Stopwatch, Timed, Untested, previous, run_of
from harp.experiments.recipe import Recipe
from harp.experiments.run import Run
from harp.system import files
from harp.system.memory import most_resident, resident
from harp.training import objectives

WARM_UP = 2  # steps that are not counted: they trace, compile and fill caches
_MOST_STEPS = 40
_LEAST_SECONDS = 1.0  # of counted steps together: a few of a millisecond each would say nothing
_SECONDS_FOR_MEMORY = 6.0


@dataclass(frozen=True)
class Wish:
    """What to measure: a stage by its number, so many steps, in about so many seconds."""

    stage: int
    batch: int  # of one process
    sizes: Sizes
    steps: int
    seconds: float
    before: bool  # evaluate the network as it is before the stage
    after: bool  # and after it


def measure(made: Recipe, wish: Wish) -> dict[str, Any]:
    """Measure a stage in this process."""
    stage = made.stages[wish.stage]
    passing = seconds_of_a_pass(made, wish)
    updates, passes = passes_of(made.stage_objective(stage))
    batch, counted = affordable(wish, passing * updates * passes)
    found: dict[str, Any] = {"passing": passing}
    if batch < wish.batch and stage.epochs:
        found |= _memory(made, wish, passing)
    with tempfile.TemporaryDirectory() as root:
        found = {**_stage(made, wish, batch, counted, passing, Path(root)), **found, "batch": batch}
    if batch < wish.batch and stage.epochs:
        median = statistics.median(found["steps"])
        fixed, each = solved([*found.pop("probes"), (updates, updates * passes * batch, median)])
        found["scale"] = updates * (fixed + passes * wish.batch * each) / median
    return found


def _memory(made: Recipe, wish: Wish, passing: float) -> dict[str, Any]:
    """The peak memory with two smaller batches, and what an image more takes: the same for every step of an attack.

    `probes` are updates, passes of images and seconds of their steps, with one step of attack.
    """
    most = math.ceil(wish.batch / made.stages[wish.stage].accumulate)
    fits = max(4, int(_SECONDS_FOR_MEMORY / (10 * passing)))
    batch = min(most, fits - fits % 2)
    options = dict(made.stage_objective(made.stages[wish.stage]))
    options |= {key: 1 for key in ("steps", "replays") if key in objectives.options(options["name"])}
    peaks, probes = [], []
    for size in (max(2, batch // 2), batch):
        watch = Stopwatch(made.stages[wish.stage].name)
        with tempfile.TemporaryDirectory() as root:
            work = run_of(
                Untested,
                made,
                wish.stage,
                wish.sizes,
                batch=size,
                steps=2,
                held=2,
                root=Path(root),
                watch=watch,
                objective=options,
            )
            work.stage(wish.stage, work.recipe.stages[wish.stage], previous(work, wish.stage))
        peaks.append(_peak(work))
        probes.append((1, passes_of(options)[1] * size, watch.seconds()[-1]))
    each = max(0, peaks[1] - peaks[0]) / max(1, batch - max(2, batch // 2))
    return {"peak_bytes": peaks[1], "peak_batch": batch, "bytes_an_image": each, "probes": probes}


def _peak(work: Run) -> int:
    device = work.fabric.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else most_resident() or 0


def _stage(made: Recipe, wish: Wish, batch: int, steps: int, passing: float, root: Path) -> dict[str, Any]:
    """Do the stage with batches of one size."""
    wished = wish.sizes.held(made)
    held = max(2, min(wished, runner.BATCH, int(2.0 / (passing * 25) if passing else wished)))
    whole = batch == wish.batch
    warm = WARM_UP if whole else 1
    watch = Stopwatch(made.stages[wish.stage].name)
    work = run_of(
        Timed,
        made,
        wish.stage,
        wish.sizes,
        batch=batch,
        steps=warm + steps,
        held=held,
        root=root,
        watch=watch,
        whole=whole,
    )
    answer = previous(work, wish.stage)
    stage = work.recipe.stages[wish.stage]
    device = work.fabric.device
    found: dict[str, Any] = {"device": device.type}
    if wish.before:
        found["before"] = _evaluation(work, passing, held)
    watch.folder = work.stage_folder(wish.stage)
    began, base = time.perf_counter(), resident()
    answer = work.stage(wish.stage, stage, answer)
    took = time.perf_counter() - began
    work.cut_out(answer)
    if stage.epochs:
        found |= {"steps": watch.seconds()[warm:], "share": watch.share()}
        found["validation_seconds"] = work.validating / len(work.held)
        found["epoch_seconds"] = max(0.0, watch.ended - watch.stamps[-1] - work.validating)
        facts = files.read_json(watch.folder / "stage.json")
        energy, seconds = facts["energy"], facts["seconds"]
        found |= {"watts": energy["kwh"] * 3.6e6 / seconds if seconds else 0.0, "energy_by": energy["by"]}
    else:
        found |= {"steps": [], "once_seconds": took}
    found |= {"base_bytes": base or 0, "state_bytes": watch.state_bytes, "peak_bytes": _peak(work)}
    found["result_bytes"] = sum(path.stat().st_size for path in watch.folder.rglob("*") if path.is_file())
    if device.type == "cuda":
        found["device_bytes"] = torch.cuda.mem_get_info(device)[1]
    if wish.after:
        found["after"] = _evaluation(work, passing, held)
    return found


def _evaluation(work: Run, passing: float, count: int) -> dict[str, Any]:
    """What each attack of the recipe takes for an image."""
    device = next(work.model.parameters()).device
    x = work.data.test.images[: min(count, 32)].to(device).float().div(255)
    ball = build.threat(work.recipe)
    attacks = [build.attack_of(wish, ball) for wish in work.recipe.evaluate.attacks]
    found = {}
    for name, attack in [("natural", None), *attacks]:
        seconds, less = seconds_an_image(work.model, attack, x, work.data.num_classes, passing)
        found[name] = {"seconds": seconds, "bound": less}
    return found


def seconds_of_a_pass(made: Recipe, wish: Wish) -> float:
    """A forward pass of an image, roughly: to choose how much to measure."""
    noise = wish.sizes.noise(2, 2)
    model = build.build(made.model, noise, None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    x = noise.train.images.to(device).float().div(255)
    times = []
    with torch.no_grad():
        for _ in range(3):
            began = time.perf_counter()
            float(model(x).sum())
            times.append((time.perf_counter() - began) / 2)
    return min(times)


def passes_of(objective: Mapping[str, Any]) -> tuple[int, float]:
    """The updates of a step, and how many forward passes an image takes in each, roughly."""
    kind = objectives.made(objective)
    return kind.replays, 2 * getattr(kind, "steps", 0) + (6 if hasattr(kind, "beta") else 3)


def solved(steps: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The fixed seconds of an update and those of a pass of an image, from steps of so many updates and passes.

    Least squares of the relative errors; neither is negative. What is fixed, such as sorting the scores of all weights,
    is most of a step of few images, and little of a step of many.
    """
    rows = [(updates / seconds, passes / seconds) for updates, passes, seconds in steps]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    fixed, each = ((bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant) if determinant > 0 else (-1.0, 0.0)
    if fixed < 0:
        return 0.0, b / bb
    return (fixed, each) if each > 0 else (0.0, b / bb)


def affordable(wish: Wish, guess: float) -> tuple[int, int]:
    """The batch, smaller than the real one if need be, and the number of counted steps."""
    step = guess * wish.batch
    if step * (WARM_UP + wish.steps) <= wish.seconds:
        wanted = max(wish.steps, int(_LEAST_SECONDS / step) if step else _MOST_STEPS)
        return wish.batch, min(wanted, max(wish.steps, _MOST_STEPS))
    fits = int(wish.seconds / (guess * (1 + wish.steps)))
    if fits >= 4:
        return min(wish.batch, fits), wish.steps
    return min(wish.batch, 2), max(1, min(wish.steps, 2))


def main() -> None:
    """Read a wish, print what was found."""
    told = json.load(sys.stdin)
    shape = tuple(told["wish"]["sizes"].pop("shape"))
    wish = Wish(**{**told["wish"], "sizes": Sizes(**told["wish"]["sizes"], shape=shape)})
    found = measure(recipe.parse(told["recipe"]), wish)
    print(json.dumps(found))


def message(made: Recipe, wish: Wish) -> str:
    """What `main` reads."""
    return json.dumps({"recipe": made.model_dump(mode="json", exclude_defaults=True), "wish": asdict(wish)})


if __name__ == "__main__":
    main()
