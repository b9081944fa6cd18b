"""Evidence: what the runs of a claim measured, as one small file that anybody can check.

    {"claim": "overview", "variant": "small", "harp": ..., "commit": ..., "date": ..., "machine": ..., "records": [...]}

A record is one run: experiment, method, share, seed, the digest of its recipe, how much it keeps, and by measure a
value in per cent with the number of images. `problems` says what is wrong with a file, so that numbers made elsewhere
can be taken over. Beside accuracies, measures are

    kept first, kept last              the share of the first and of the last layer's weights that is kept
    pruned natural, pruned robust      accuracy on held-out images in the last epoch of pruning
    middle magnitude                   100 times the mean magnitude of kept weights between these two layers
"""

import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from harp import __version__
from harp.errors import CheckpointError
from harp.evaluation.confidence import interval, wilson
from harp.experiments import run_folder
from harp.experiments.compare import Comparison, Entry
from harp.experiments.recipe import Recipe
from harp.experiments.reproduction.claim import Cell, Claim
from harp.experiments.reproduction.verdict import Measured
from harp.experiments.run_folder import Finished
from harp.system import files
from harp.system.tensors import load_tensors

SHIPPED = Path(__file__).parent / "evidence"
_UNTESTED = ("name", "description", "seed", "evaluate")  # keys of a recipe that do not change what is trained


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Value(_Part):
    """A number in per cent, of so many images; 0 images: not an accuracy."""

    value: float
    images: int = 0


class Record(_Part):
    """One run."""

    experiment: str
    method: str
    keep: float | None
    seed: int
    recipe: str
    kept: int
    size: int
    unit: str = "weights"
    balanced: bool = False
    epsilon: float | None = None
    seconds: float = 0.0
    at_chance: bool = False
    budget_met: bool = True
    versions: dict[str, str] = {}
    values: dict[str, Value]
    rates: tuple[float, ...] = ()  # the share that each layer keeps, in the network's order


class Evidence(_Part):
    """The records of a claim."""

    claim: str
    variant: Literal["full", "small"]
    harp: str
    commit: str
    date: str
    machine: str
    records: tuple[Record, ...]

    def measured(self, cell: Cell) -> Measured | None:
        """A cell's mean over seeds with its interval; of one seed the interval over its images."""
        values = [value for _, value in self.by_seed(cell)]
        if not values:
            return None
        mean, half = interval([value.value for value in values])
        low, high = mean - half, mean + half
        if math.isnan(half):
            share, images = mean / 100, values[0].images
            low, high = (100 * bound for bound in wilson(share, images)) if images else (mean, mean)
        return Measured(mean, low, high, len(values), values[0].images)

    def by_seed(self, cell: Cell) -> list[tuple[int, Value]]:
        """A cell's value of each seed."""
        key = (cell.experiment, cell.method, cell.keep)
        return sorted(
            (record.seed, record.values[cell.measure])
            for record in self.records
            if (record.experiment, record.method, record.keep) == key and cell.measure in record.values
        )

    def write(self, path: Path) -> None:
        """Write it, a record a line."""
        head = self.model_dump(mode="json", exclude={"records"})
        lines = [json.dumps(record.model_dump(mode="json", exclude_defaults=True)) for record in self.records]
        text = json.dumps(head, indent=1)[:-2] + ',\n "records": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
        files.write_text(path, text)


def read(path: Path) -> Evidence:
    """Read a file of evidence."""
    try:
        return Evidence.model_validate(files.read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is no evidence: {where}: {first['msg']}") from error


def shipped(claim: str, *, small: bool) -> Evidence | None:
    """The evidence that comes with the package, if there is any."""
    path = SHIPPED / f"{claim}{'-small' if small else ''}.json"
    return read(path) if path.is_file() else None


def digest(recipe: Recipe) -> str:
    """What is trained, without seed and name, as a short text."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    trained = {key: value for key, value in content.items() if key not in _UNTESTED}
    return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()[:12]


def collect(claim: Claim, *, small: bool, comparisons: Mapping[str, Comparison]) -> Evidence:
    """What the finished runs of a claim measured."""
    records = [
        record(experiment, entry)
        for experiment, comparison in comparisons.items()
        for entry in comparison.entries
        if entry.finished()
    ]
    return made(claim, records, small=small)


def made(claim: Claim, records: Iterable[Record], *, small: bool) -> Evidence:
    """Evidence from records, with where and when it was made."""
    return Evidence(
        claim=claim.id,
        variant="small" if small else "full",
        harp=__version__,
        commit=_commit(),
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{platform.system()} {platform.machine()}, {_device()}",
        records=tuple(records),
    )


def record(experiment: str, entry: Entry) -> Record:
    """A finished run as a record."""
    run = run_folder.read(entry.folder)
    summary, budget = run.summary, run_folder.budget_of(run.summary)
    results = list(summary["results"])
    attack: Mapping[str, Any] = next((result["attack"] for result in results if result.get("attack")), {})
    values = {result["name"]: Value(value=100 * result["value"], images=result["n"]) for result in results}
    return Record(
        experiment=experiment,
        method=entry.method,
        keep=entry.keep,
        seed=entry.recipe.seed,
        recipe=digest(entry.recipe),
        kept=int(budget["kept"]),
        size=int(budget["size"]),
        unit=str(budget["unit"]),
        balanced=results[0].get("measure") == "balanced accuracy",
        epsilon=attack.get("epsilon"),
        seconds=sum((stage.facts or {}).get("seconds") or 0.0 for stage in run.stages[entry.shared() :]),
        at_chance=bool(summary.get("at_chance", False)),
        budget_met=bool(summary.get("budget_met", True)),
        versions={key: str(value) for key, value in results[0].get("versions", {}).items()},
        values=values if entry.keep is None else {**values, **_other_measures(run)},
        rates=tuple(round(layer["kept"] / layer["size"], 6) for layer in summary["layers"]) if entry.keep else (),
    )


def _other_measures(run: Finished) -> dict[str, Value]:
    layers = run.summary["layers"]
    shares = {name: 100 * layers[index]["kept"] / layers[index]["size"] for name, index in _ENDS.items()}
    measures = {**shares, "middle magnitude": _middle_magnitude(run.folder, [layer["name"] for layer in layers])}
    history = next((_history(stage.facts) for stage in run.stages if _prunes(stage.facts)), [])
    if history:
        measures |= {f"pruned {name}": 100 * history[-1][name] for name in ("natural", "robust") if name in history[-1]}
    return {name: Value(value=round(value, 6)) for name, value in measures.items()}


_ENDS = {"kept first": 0, "kept last": -1}


def _prunes(facts: Mapping[str, Any] | None) -> bool:
    return facts is not None and facts.get("stage") == "prune"


def _history(facts: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    return (facts or {}).get("history") or []


def _middle_magnitude(folder: Path, names: Sequence[str]) -> float:
    weights, _ = load_tensors(folder / "model.safetensors")
    kept = [weights[name][weights[name] != 0].abs().double() for name in names[1:-1] if name in weights]
    count = sum(values.numel() for values in kept)
    return 100 * sum(float(values.sum()) for values in kept) / max(1, count)


def problems(evidence: Evidence, claim: Claim) -> list[str]:
    """What is wrong with evidence of a claim: other recipes, budgets that are not met, shares that can not be."""
    if evidence.claim != claim.id:
        return [f"is of the claim {evidence.claim}, not of {claim.id}"]
    variant = claim.variant(small=evidence.variant == "small")
    planned = {name: experiment.recipes(name) for name, experiment in variant.experiments.items()}
    found, seen = [], set()
    for number, run in enumerate(evidence.records):
        name = f"record {number} ({run.experiment}, {run.method}, seed {run.seed})"
        key = (run.experiment, run.method, run.keep, run.seed)
        if key in seen:
            found.append(f"{name} is there twice")
        seen.add(key)
        recipe = planned.get(run.experiment, {}).get((run.method, run.keep))
        if recipe is None:
            if run.keep is not None or not run.method.startswith("dense"):
                found.append(f"{name}: the claim has no such run")
        elif digest(recipe) != run.recipe:
            found.append(f"{name}: recipe {run.recipe}, the claim's is {digest(recipe)}")
        if run.keep is not None and run.kept > math.floor(run.keep * run.size + 0.5):
            budget = math.floor(run.keep * run.size + 0.5)
            found.append(f"{name}: keeps {run.kept:,} of {run.size:,} {run.unit}, the budget is {budget:,}")
        for measure, value in run.values.items():
            right = value.value / 100 * value.images
            if value.images and not run.balanced and abs(right - round(right)) > 1e-3:
                found.append(f"{name}: {measure} {value.value} % is no whole number of {value.images} images")
            if value.images and not 0 <= value.value <= 100:
                found.append(f"{name}: {measure} {value.value} % is no share")
    return found


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _commit() -> str:
    """The commit of the source, where it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
