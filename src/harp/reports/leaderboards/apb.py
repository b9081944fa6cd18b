"""Submissions to the Adversarial Pruning Benchmark (https://github.com/pralab/AdversarialPruningBenchmark).

    FOLDER/submission.json            what is submitted: models, numbers, hashes
    FOLDER/taxonomy.json              the method's entry (see `taxonomy.py`)
    FOLDER/checkpoints/KEY.pt         {"state_dict": ...}, dense, masks multiplied in, for the benchmark's base models
    FOLDER/distances/KEY.pickle,.json minimum norms of perturbations
    FOLDER/normalised.py              only where a model needs normalisation: what it is
    FOLDER/ISSUE.md, CHECKLIST.md     the text of the issue; what is left to do by hand

Protocol of the benchmark: AutoAttack, standard version, L-inf, epsilon 0.031, on the first 10,000 test images, plain
accuracy (on SVHN too, where we otherwise report balanced accuracy); FMN distances, robust if above 8/255. The sparsity
is that of the weights, also where whole channels were pruned; the base models have their full width, so a network that
channels were cut out of is submitted with zeros in their place.

Departures from the benchmark's code:
- a point that FMN never breaks has an infinite distance and counts as robust. Theirs is 0, which counts as broken;
- the distances file is the pickle of a plain list of floats: their `pickle.load` and `torch.tensor` take it like their
  own list of tensors, but it names no function and so can be read without running code. The JSON file beside it has
  the same numbers, null for infinity;
- the key of a new method is made here: the benchmark's function knows only the methods that are listed already.

Normalisation. The base models have none. (x − μ)/σ before a convolution padded with zeros equals the convolution with
weights w/σ exactly if μ = 0; then it is folded into the first layer. If μ is not 0, the padding would have to be μ, and
a folded network would differ at the border of the image: the checkpoint then holds the network behind the
normalisation, the issue declares the normalisation, and `normalised.py` defines it.
"""

import hashlib
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harp.errors import DataError, ModelError, RecipeError
from harp.experiments import run_folder
from harp.experiments.run_folder import Finished
from harp.models import MODELS
from harp.pruning.papers import Structure
from harp.reports import templating
from harp.reports.leaderboards import taxonomy
from harp.reports.leaderboards.submission import (
    ERROR,
    WARNING,
    Submission,
    check_free,
    checked,
    fresh,
    paper_of,
    read_json,
)
from harp.system import files
from harp.system.tensors import save_state

EPSILON = 0.031
ROBUST_ABOVE = 8 / 255  # distances
TESTED = 10_000
SPARSITIES = {"US": (90, 95, 99), "S": (50, 75, 90)}
ARCHITECTURES = {"resnet18": "R18", "vgg16": "V16"}
DATA = {"cifar10": "CIFAR10", "svhn": "SVHN"}

_AP_KEY = re.compile(r"[^\W_]+_[^\W\d_]+\d{4}[^\W_]+")  # one underscore: their loader counts them
_ROUNDING = 0.05  # per cent of sparsity
_SURPLUS = 1.0  # per cent by which structured sparsity may be above its level: channels don't divide evenly


def prepare(
    runs: Sequence[str | Path], out: str | Path, *, ap_key: str | None = None, paper: str | None = None
) -> Submission:
    """Write the folder of a submission of finished runs of one method; `problems` says what is still missing.

    `ap_key` is the method's key, like HARP_Zhao2023Holistic, and `paper` the link to its paper; by default both are
    those of the method's class. What the benchmark has no place for (another architecture, data set or sparsity) is an
    error, and nothing is written.
    """
    folder = Path(out)
    check_free(folder)
    if not runs:
        raise RecipeError("no runs to submit: give the folders of at least three, one for each sparsity")
    read = [run_folder.read(run) for run in runs]
    ap_key, paper = ap_key or _key(read[0]), paper or paper_of(read[0], "paper").link
    if not _AP_KEY.fullmatch(ap_key):
        raise RecipeError(f"ap_key {ap_key!r}: write Name_AuthorYearWord, like HARP_Zhao2023Holistic")
    if not re.fullmatch(r"https?://\S+", paper):
        raise RecipeError(f"paper {paper!r}: give its link, like https://openreview.net/pdf?id=sAJDi9lD06L")
    entry = _common_entry(read, ap_key, paper)
    with fresh(folder) as draft:
        entries: dict[str, dict[str, Any]] = {}
        for run in read:  # one network in memory at a time
            model, state, distances = _model(run, ap_key)
            key = model["key"]
            if key in entries:
                other = read[list(entries).index(key)].folder
                raise RecipeError(f"{other} and {run.folder} are both {key}: give one of them")
            checkpoint, pickled = draft / "checkpoints" / f"{key}.pt", draft / "distances" / f"{key}.pickle"
            save_state(checkpoint, {"state_dict": state})
            if distances:
                # Protocol 2 keeps floats as they are and frames nothing: the smallest thing that their loader reads.
                files.write_bytes(pickled, pickle.dumps(distances, protocol=2))
                files.write_json(pickled.with_suffix(".json"), distances)
            digests = {"sha256": _sha256(checkpoint), "distances_sha256": _sha256(pickled) if distances else None}
            entries[key] = {**model, **digests}
        listed = list(entries.values())
        files.write_json(draft / "taxonomy.json", entry)
        files.write_json(draft / "submission.json", {"benchmark": "apb", "ap_key": ap_key, "models": listed})
        declared = {key: tuple(map(tuple, e["normalisation"])) for key, e in entries.items() if e["normalisation"]}
        if declared:
            files.write_text(draft / "normalised.py", templating.render("normalised.py.jinja", declared=declared))
        values = {"entry": entry, "json": json.dumps(entry, indent=2, ensure_ascii=False), "epsilon": EPSILON}
        issue = templating.render("apb_issue.md", **values, models=listed, results=_results)
        files.write_text(draft / "ISSUE.md", issue)
        problems = validate(draft)
        checklist = templating.render("apb_checklist.md", models=listed, problems=problems)
        files.write_text(draft / "CHECKLIST.md", checklist)
    return Submission(folder, tuple(problems))


def _results(model: Mapping[str, Any]) -> str:
    """The lines of the benchmark's issue that hold a model's numbers."""
    lines = (("Clean Accuracy", "clean"), ("Robust Accuracy (AA)", "autoattack"), ("Robust Accuracy (HO-FMN)", "fmn"))
    values = [(title, model[name]) for title, name in lines]
    return "\n".join(
        f"_{title}:_ {'not measured' if claim is None else format(claim['value'], '.2f')}" for title, claim in values
    )


def validate(folder: str | Path) -> list[str]:
    """What is wrong with a prepared folder, from its files alone: lines that begin with `error:` or `warning:`."""
    return checked(Path(folder), _problems)


def _problems(folder: Path) -> list[str]:
    content, entry = read_json(folder / "submission.json"), read_json(folder / "taxonomy.json")
    issue = (folder / "ISSUE.md").read_text(encoding="utf-8")
    entries = list(content["models"])
    problems = [*_wrong_entry(entry, content["ap_key"]), *_wrong_groups(entries)]
    for model in entries:
        problems += _wrong_model(folder, model, issue)
    if any(model["fmn"] for model in entries):
        problems.append(f"{WARNING}FMN ran without the tuning of HO-FMN: the benchmark's numbers may be lower")
    if any(model["normalisation"] for model in entries) and not (folder / "normalised.py").is_file():
        problems.append(f"{ERROR}normalised.py is missing, and some models need normalisation")
    return problems


def fold(state: Mapping[str, Tensor], first: str) -> tuple[dict[str, Tensor], tuple[list[float], list[float]] | None]:
    """The tensors of the network behind a normalisation, which is folded into layer `first` if that is exact.

    Otherwise mean and std of the normalisation are returned beside them. A network without normalisation is unchanged.
    """
    if not {"mean", "std"} <= state.keys():
        return dict(state), None
    inner = {name.removeprefix("net."): tensor for name, tensor in state.items() if name not in ("mean", "std")}
    mean, std = state["mean"].flatten(), state["std"].flatten()
    if bool((mean == 0).all()):
        inner[first] = (inner[first].double() / std.double().view(1, -1, 1, 1)).to(inner[first].dtype)
        return inner, None
    return inner, (mean.tolist(), std.tolist())


def shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a base model, which are those of our network of the same name (the tests compare them)."""
    with torch.device("meta"):
        model = MODELS[architecture].factory(num_classes=10)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def robust_share(distances: Sequence[float]) -> float:
    """The share of points that are farther than 8/255 from the nearest one that is misclassified."""
    return sum(value > ROBUST_ABOVE for value in distances) / len(distances)


def _key(run: Finished) -> str:
    """A key like those of the benchmark, from the method's title and its paper."""
    paper, title = paper_of(run, "key"), taxonomy.method(run.recipe).title
    name = re.sub(r"\(.*|[\W_]", "", title or taxonomy.method(run.recipe).__name__)
    word = re.search(r"[^\W\d_]+", paper.title)
    return f"{name}_{paper.surnames[0]}{paper.year}{word[0] if word else ''}"


def _common_entry(runs: Sequence[Finished], ap_key: str, paper: str) -> dict[str, str]:
    """The taxonomy entry of all runs: they must be of one method."""
    first = taxonomy.entry(runs[0].recipe, ap_key, paper)
    for run in runs[1:]:
        other = taxonomy.entry(run.recipe, ap_key, paper)
        unlike = [key.strip(": ") for key in first.keys() | other.keys() if first.get(key) != other.get(key)]
        methods = [one.pruning.pruner["name"] if one.pruning else "dense" for one in (runs[0], run)]
        if methods[0] != methods[1]:
            unlike.insert(0, f"method ({methods[0]}, {methods[1]})")
        if unlike:
            raise RecipeError(f"{runs[0].folder} and {run.folder} differ in {unlike[0]}: submit one method at a time")
    return first


def _model(run: Finished, ap_key: str) -> tuple[dict[str, Any], dict[str, Tensor], list[float] | None]:
    """The entry, the tensors and the distances of a run as a model of the benchmark, or an error if it is none."""
    recipe = run.recipe
    if recipe.data.name not in DATA:
        raise DataError(f"{run.folder}: trained on {run.data}, the benchmark has {', '.join(DATA)}")
    if recipe.model.name not in ARCHITECTURES or recipe.model.options.get("width", 1) != 1:
        width = f" of width {recipe.model.options['width']:g}" if "width" in recipe.model.options else ""
        known = " and ".join(f"{name} of width 1" for name in ARCHITECTURES)
        raise ModelError(f"{run.folder}: the model is {Path(recipe.model.name).name}{width}, the benchmark has {known}")
    expected = shapes(recipe.model.name)
    state, normalisation = fold(run.state(), next(iter(expected)))
    wrong = _unlike(state, expected)
    if wrong:
        raise ModelError(f"{run.folder}: the weights don't fit the benchmark's {recipe.model.name}: {wrong}")
    state = {name: state[name].contiguous() for name in expected}
    kept, size = _count(state)
    sparsity = 100 * (1 - kept / size)
    structure = "US" if taxonomy.structure(recipe) is Structure.WEIGHTS else "S"
    nearest = min(SPARSITIES[structure], key=lambda level: abs(level - sparsity))
    if not _is_at_level(sparsity, nearest, structure):
        levels = ", ".join(map(str, SPARSITIES[structure]))
        raise RecipeError(f"{run.folder}: {sparsity:.2f} % of the weights are pruned, the benchmark takes {levels} %")
    distances = _distances(run)
    entry = {
        "key": "_".join([ap_key, ARCHITECTURES[recipe.model.name], DATA[recipe.data.name], structure, str(nearest)]),
        "architecture": recipe.model.name,
        "dataset": DATA[recipe.data.name],
        "structure": structure,
        "sparsity": nearest,
        "kept": kept,
        "size": size,
        "channels": _channels(run),
        "normalisation": normalisation,
        "method": run.pruning.pruner if run.pruning else None,
        "seed": recipe.seed,
        "recipe": run.summary.get("recipe"),
        "clean": _claim(run_folder.named(run, "natural")),
        "autoattack": _claim(run_folder.named(run, "autoattack", EPSILON)),
        "fmn": None if not distances else {"value": 100 * robust_share(distances), "n": len(distances)},
    }
    return entry, state, distances


def _distances(run: Finished) -> list[float] | None:
    """The L-inf distances of a run, infinite if FMN found nothing; of several records the longest."""
    measured = [record["values"] for record in run.of_kind("distances") if record["norm"] == "linf"]
    longest: list[float | None] = max(measured, key=len, default=[])
    return [math.inf if value is None else float(value) for value in longest] or None


def _claim(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    right, n = run_folder.plain_correct(result)
    return {"value": 100 * right / n, "n": n}


def _count(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """The non-zero weights of all convolutions and linear layers, and the number of all their weights."""
    weights = [tensor for tensor in state.values() if tensor.ndim > 1]
    return sum(int(weight.count_nonzero()) for weight in weights), sum(weight.numel() for weight in weights)


def _is_at_level(sparsity: float, level: int, structure: str) -> bool:
    """Whether a sparsity (in per cent) counts as a level; pruned channels may be somewhat more, never less."""
    return -_ROUNDING <= sparsity - level <= (_ROUNDING if structure == "US" else _SURPLUS)


def _channels(run: Finished) -> dict[str, Any] | None:
    """What is kept of the channels and of what their budget counts; None if single weights were pruned."""
    if run.recipe.units.kind != "channels":
        return None
    kept, size = (sum(int(layer[key]) for layer in run.summary["layers"]) for key in ("kept", "size"))
    return {"kept": kept, "size": size, "budget": {"unit": run.unit, "kept": run.kept, "size": run.size}}


def _unlike(state: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a strict load would fail, if it would."""
    for name in expected:
        if name not in state:
            return f"{name!r} is missing"
        if tuple(state[name].shape) != expected[name]:
            return f"{name!r} is {list(state[name].shape)}, expected {list(expected[name])}"
    extra = next((name for name in state if name not in expected), None)
    return None if extra is None else f"{extra!r} is not in it"


def _wrong_entry(entry: Mapping[str, str], ap_key: str) -> list[str]:
    pipeline = entry.get(taxonomy.PIPELINE, "")
    if pipeline not in taxonomy.STEPS:
        return [f"{ERROR}taxonomy.json: {pipeline!r} is not a pipeline of the benchmark"]
    problems = []
    if tuple(entry) != taxonomy.keys(pipeline):
        odd = sorted(set(entry) ^ set(taxonomy.keys(pipeline)))
        problems.append(f"{ERROR}taxonomy.json: its keys are not the benchmark's{f' ({odd[0]!r})' if odd else ''}")
    if entry.get("ap_key") != ap_key or not _AP_KEY.fullmatch(ap_key):
        problems.append(f"{ERROR}taxonomy.json: ap_key is {entry.get('ap_key')!r}, the models' is {ap_key!r}")
    empty = [key for key, value in entry.items() if not isinstance(value, str) or not value.strip()]
    problems += [f"{ERROR}taxonomy.json: {key!r} is empty" for key in empty]
    if taxonomy.UNSPECIFIED in entry.values():
        keys = ", ".join(key.strip(": ") for key, value in entry.items() if value == taxonomy.UNSPECIFIED)
        text = f"neither the recipe nor the method's class says what to write for {keys}: fill it in by hand"
        problems.append(f"{WARNING}taxonomy.json: {text}")
    return problems


def _wrong_groups(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """One architecture, data set and structure needs all its sparsities; the full suite has four such groups."""
    groups: dict[tuple[str, str, str], set[int]] = {}
    for model in models:
        group = (model["architecture"], model["dataset"], model["structure"])
        groups.setdefault(group, set()).add(model["sparsity"])
    complete = [group for group, levels in groups.items() if levels >= set(SPARSITIES[group[2]])]
    problems = []
    for group, levels in groups.items():
        missing = [f"{level} %" for level in SPARSITIES[group[2]] if level not in levels]
        if missing:
            grade = WARNING if complete else ERROR
            problems.append(f"{grade}{' '.join(group)}: no run at {', '.join(missing)}; three sparsities are one entry")
    if complete and len(complete) < len(ARCHITECTURES) * len(DATA):
        text = f"{len(complete)} of 4 architecture and data set pairs: the benchmark encourages all of them"
        problems.append(f"{WARNING}{text}")
    return problems


def _wrong_model(folder: Path, model: Mapping[str, Any], issue: str) -> list[str]:
    key = model["key"]
    errors, warnings = _wrong_numbers(model)
    for name, digest in ((f"checkpoints/{key}.pt", "sha256"), (f"distances/{key}.pickle", "distances_sha256")):
        if model.get(digest) and (not (folder / name).is_file() or _sha256(folder / name) != model[digest]):
            errors.append(f"{name} is missing, or not the file that was prepared")
    if _results(model) not in issue or key not in issue:
        errors.append("ISSUE.md does not have its numbers")
    if model["normalisation"]:
        warnings.append("needs normalisation, which the base models lack: declared in the issue")
    if model["structure"] == "S":
        warnings.append("its sparsity is the share of pruned weights, not of channels")
    return [*(f"{ERROR}{key}: {text}" for text in errors), *(f"{WARNING}{key}: {text}" for text in warnings)]


def _wrong_numbers(model: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Errors and warnings about the claimed numbers."""
    errors, warnings = [], []
    titles = {"clean": "accuracy on clean images", "autoattack": f"AutoAttack at epsilon {EPSILON}"}
    for name, title in {**titles, "fmn": "L-inf distances of FMN"}.items():
        claim = model[name]
        if claim is None:
            errors.append(f"no {title} was measured (`harp evaluate` the run, then prepare again)")
        elif name != "fmn" and (claim["n"] != TESTED or model["dataset"] == "SVHN"):
            drawn = f"{title} on {claim['n']:,} images drawn from the test set"
            warnings.append(f"{drawn}, the benchmark takes its first {TESTED:,}")
    clean, attacked = model["clean"], model["autoattack"]
    if clean and attacked and clean["n"] == attacked["n"] and attacked["value"] > clean["value"]:
        errors.append("the accuracy under AutoAttack is above the clean one")
    return errors, warnings


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
