"""Submissions to the Adversarial Pruning Benchmark (https://github.com/pralab/AdversarialPruningBenchmark).

    FOLDER/submission.json            what is submitted: models, numbers, hashes
    FOLDER/taxonomy.json              the method's entry (see `taxonomy.py`)
    FOLDER/checkpoints/KEY.pt         {"state_dict": ...}, dense, masks multiplied in, for the benchmark's base models
    FOLDER/distances/KEY.pickle,.json minimum norms of perturbations
    FOLDER/normalised.py              only where a model needs normalisation: what it is
    FOLDER/ISSUE.md, CHECKLIST.md     the text of the issue; what is left to a person

Protocol of the benchmark: AutoAttack, standard version, L-inf, epsilon 0.031, on the first 10,000 test images, plain
accuracy (on SVHN too, where we otherwise report balanced accuracy); FMN distances, robust if above 8/255. The sparsity
is that of the weights, also where whole channels were pruned; the base models have their full width, so a network that
channels were cut out of is submitted with zeros in their place.

Departures from the benchmark's code:
- a point that FMN never breaks has an infinite distance and counts as robust. Theirs is 0, which counts as broken;
- the distances file is the pickle of a plain list of floats: their `pickle.load` and `torch.tensor` take it like their
  own list of tensors, but it names no function and so can be read without running anything. The JSON file beside it has
  the same numbers, null for infinity;
- a new method's key is made here: their key maker knows only the methods that are listed already.

Normalisation. The base models have none. (x − μ)/σ before a convolution padded with zeros is the convolution of weights
w/σ exactly if μ = 0; then it is folded into the first layer. If μ is not 0 the padding would have to be μ, and a folded
network would be another one at the border of the image: the checkpoint then holds the network behind the normalisation,
the normalisation is declared in the issue, and `normalised.py` defines it.
"""

import hashlib
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harp.data.formats.bounded import Payload
from harp.data.formats.safe_pickle import unpickle
from harp.errors import CheckpointError, DataError, HarpError, ModelError, RecipeError
from harp.experiments import run_folder
from harp.experiments.run_folder import Finished
from harp.pruning.papers import Structure
from harp.reports.leaderboards import apb_texts as texts
from harp.reports.leaderboards import taxonomy
from harp.reports.leaderboards.apb_texts import EPSILON, Normalisation
from harp.reports.leaderboards.base_models import BASES, shapes
from harp.reports.leaderboards.submission import ERROR, WARNING, Submission, check_free, fresh, paper_of, read_json
from harp.system import files
from harp.system.tensors import load_state, save_state

ROBUST_ABOVE = 8 / 255  # distances
TESTED = 10_000
SPARSITIES = {"US": (90, 95, 99), "S": (50, 75, 90)}
ARCHITECTURES = {"resnet18": "R18", "vgg16": "V16"}
DATA = {"cifar10": "CIFAR10", "svhn": "SVHN"}

_AP_KEY = re.compile(r"[^\W_]+_[^\W\d_]+\d{4}[^\W_]+")  # one underscore: their loader counts them
_ROUNDING = 0.05  # per cent of sparsity
_SURPLUS = 1.0  # the same, by which structured sparsity may be above its level: channels don't divide evenly


@dataclass(frozen=True)
class _Model:
    """A run as the benchmark sees it."""

    run: Finished
    key: str
    facts: dict[str, Any]
    state: dict[str, Tensor]
    distances: list[float] | None


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
    seen: dict[str, Path] = {}
    with fresh(folder) as draft:
        models = []
        for run in read:
            model = _model(run, ap_key)
            if model.key in seen:
                raise RecipeError(f"{seen[model.key]} and {run.folder} are both {model.key}: give one of them")
            seen[model.key] = run.folder
            models.append(_write_model(draft, model))  # one network in memory at a time
        files.write_json(draft / "taxonomy.json", entry)
        files.write_json(draft / "submission.json", {"benchmark": "apb", "ap_key": ap_key, "models": models})
        declared = {model["key"]: model["normalisation"] for model in models if model["normalisation"]}
        if declared:
            files.write_text(draft / "normalised.py", texts.definition(declared))
        files.write_text(draft / "ISSUE.md", texts.issue(entry, models))
        problems = validate(draft)
        files.write_text(draft / "CHECKLIST.md", texts.checklist(models, problems))
    return Submission(folder, tuple(problems))


def validate(folder: str | Path) -> list[str]:
    """What is wrong with a prepared folder, from its files alone: lines that begin with `error:` or `warning:`."""
    path = Path(folder)
    try:
        content = read_json(path / "submission.json")
        entry = read_json(path / "taxonomy.json")
        issue = (path / "ISSUE.md").read_text(encoding="utf-8")
        models = list(content["models"])
        problems = [*_wrong_entry(entry, content["ap_key"]), *_wrong_groups(models)]
        for model in models:
            problems += _wrong_model(path, model, content["ap_key"], issue)
        if any(model["fmn"] for model in models):
            problems.append(f"{WARNING}FMN ran without the tuning of HO-FMN: the benchmark's numbers may be lower")
        if any(model["normalisation"] for model in models) and not (path / "normalised.py").is_file():
            problems.append(f"{ERROR}normalised.py is missing, and some models need normalisation")
    except CheckpointError as error:
        return [f"{ERROR}{error}"]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        return [f"{ERROR}{folder} is no submission of ours, or damaged: {files.reason(error)}"]
    return problems


def fold(state: Mapping[str, Tensor], first: str) -> tuple[dict[str, Tensor], Normalisation | None]:
    """The tensors of the network behind a normalisation, which goes into layer `first` where that is exact.

    Else the normalisation is returned beside them. A network without normalisation comes back as it is.
    """
    if not {"mean", "std"} <= state.keys():
        return dict(state), None
    inner = {name.removeprefix("net."): tensor for name, tensor in state.items() if name not in ("mean", "std")}
    mean, std = state["mean"].flatten(), state["std"].flatten()
    if bool((mean == 0).all()):
        inner[first] = (inner[first].double() / std.double().view(1, -1, 1, 1)).to(inner[first].dtype)
        return inner, None
    return inner, (mean.tolist(), std.tolist())


def robust_share(distances: Sequence[float]) -> float:
    """The share of points that are farther than 8/255 from the nearest one that is misclassified."""
    return sum(value > ROBUST_ABOVE for value in distances) / len(distances)


def _key(run: Finished) -> str:
    """A key in the manner of the benchmark's, from the method's title and its paper."""
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
        methods = [each.pruning.pruner["name"] if each.pruning else "dense" for each in (runs[0], run)]
        if methods[0] != methods[1]:
            unlike.insert(0, f"method ({methods[0]}, {methods[1]})")
        if unlike:
            raise RecipeError(f"{runs[0].folder} and {run.folder} differ in {unlike[0]}: submit one method at a time")
    return first


def _model(run: Finished, ap_key: str) -> _Model:
    """A run as a model of the benchmark, or why it is none."""
    made = run.recipe
    if made.data.name not in DATA:
        raise DataError(f"{run.folder}: trained on {run.data}, the benchmark has {', '.join(DATA)}")
    if made.model.name not in ARCHITECTURES or made.model.options.get("width", 1) != 1:
        width = f" of width {made.model.options['width']:g}" if "width" in made.model.options else ""
        known = " and ".join(f"{name} of width 1" for name in BASES)
        raise ModelError(f"{run.folder}: the model is {Path(made.model.name).name}{width}, the benchmark has {known}")
    expected = shapes(made.model.name)
    first = next(iter(expected))
    state, normalisation = fold(run.state(), first)
    wrong = _unlike(state, expected)
    if wrong:
        raise ModelError(f"{run.folder}: the weights don't fit the benchmark's {made.model.name}: {wrong}")
    state = {name: state[name].contiguous() for name in expected}
    kept, size = _count(state)
    sparsity = 100 * (1 - kept / size)
    structure = "US" if taxonomy.structure(made) is Structure.WEIGHTS else "S"
    nearest = min(SPARSITIES[structure], key=lambda level: abs(level - sparsity))
    if not _at_level(sparsity, nearest, structure):
        levels = ", ".join(map(str, SPARSITIES[structure]))
        raise RecipeError(f"{run.folder}: {sparsity:.2f} % of the weights are pruned, the benchmark takes {levels} %")
    key = "_".join([ap_key, ARCHITECTURES[made.model.name], DATA[made.data.name], structure, str(nearest)])
    distances = _distances(run)
    facts = {
        "key": key,
        "architecture": made.model.name,
        "dataset": DATA[made.data.name],
        "structure": structure,
        "sparsity": nearest,
        "kept": kept,
        "size": size,
        "channels": _channels(run),
        "normalisation": normalisation,
        "method": run.pruning.pruner if run.pruning else None,
        "seed": made.seed,
        "recipe": run.summary.get("recipe"),
        "clean": _claim(run_folder.named(run, "natural")),
        "autoattack": _claim(run_folder.named(run, "autoattack", EPSILON)),
        "fmn": None if not distances else {"value": 100 * robust_share(distances), "n": len(distances)},
    }
    return _Model(run, key, facts, state, distances)


def _write_model(folder: Path, model: _Model) -> dict[str, Any]:
    """Write a model's files; what is said of them."""
    path = folder / "checkpoints" / f"{model.key}.pt"
    save_state(path, {"state_dict": model.state})
    if model.distances:
        # Protocol 2 keeps floats as they are and frames nothing: the smallest thing that their loader reads.
        files.write_bytes(folder / "distances" / f"{model.key}.pickle", pickle.dumps(model.distances, protocol=2))
        files.write_json(folder / "distances" / f"{model.key}.json", model.distances)
    return {**model.facts, "sha256": _sha256(path)}


def _distances(run: Finished) -> list[float] | None:
    """The L-inf distances of a run, infinite where FMN found nothing; of several the most."""
    found = [each["values"] for each in run.of_kind("distances") if each["norm"] == "linf" and each["values"]]
    return [math.inf if value is None else float(value) for value in max(found, key=len)] if found else None


def _claim(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    right, n = run_folder.plain_correct(result)
    return {"value": 100 * right / n, "n": n}


def _count(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """The non-zero weights of all convolutions and linear layers, and all of them."""
    weights = [tensor for tensor in state.values() if tensor.ndim > 1]
    return sum(int(weight.count_nonzero()) for weight in weights), sum(weight.numel() for weight in weights)


def _at_level(sparsity: float, level: int, structure: str) -> bool:
    """Whether a sparsity is what a level says; whole channels may have taken somewhat more, never less."""
    return -_ROUNDING <= sparsity - level <= (_ROUNDING if structure == "US" else _SURPLUS)


def _channels(run: Finished) -> dict[str, Any] | None:
    """What is left of the channels and of what their budget counts; None where single weights were pruned."""
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
    return None if extra is None else f"{extra!r} is too much"


def _wrong_entry(entry: Mapping[str, str], ap_key: str) -> list[str]:
    pipeline = entry.get(taxonomy.PIPELINE, "")
    if pipeline not in taxonomy.STEPS:
        return [f"{ERROR}taxonomy.json: {pipeline!r} is no pipeline of the benchmark"]
    problems = []
    if tuple(entry) != taxonomy.keys(pipeline):
        odd = sorted(set(entry) ^ set(taxonomy.keys(pipeline)))
        problems.append(f"{ERROR}taxonomy.json: its keys are not the benchmark's{f' ({odd[0]!r})' if odd else ''}")
    if entry.get("ap_key") != ap_key or not _AP_KEY.fullmatch(ap_key):
        problems.append(f"{ERROR}taxonomy.json: ap_key is {entry.get('ap_key')!r}, the models' is {ap_key!r}")
    empty = [key for key, value in entry.items() if not isinstance(value, str) or not value.strip()]
    problems += [f"{ERROR}taxonomy.json: {key!r} says nothing" for key in empty]
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
    complete = [group for group, found in groups.items() if found >= set(SPARSITIES[group[2]])]
    problems = []
    for group, found in groups.items():
        missing = [f"{level} %" for level in SPARSITIES[group[2]] if level not in found]
        if missing:
            grade = WARNING if complete else ERROR
            problems.append(f"{grade}{' '.join(group)}: no run at {', '.join(missing)}; three sparsities are one entry")
    if complete and len(complete) < len(ARCHITECTURES) * len(DATA):
        text = f"{len(complete)} of 4 architecture and data set pairs: the benchmark encourages all of them"
        problems.append(f"{WARNING}{text}")
    return problems


def _wrong_model(folder: Path, model: Mapping[str, Any], ap_key: str, issue: str) -> list[str]:
    key = model["key"]
    parts = (ARCHITECTURES[model["architecture"]], model["dataset"], model["structure"], str(model["sparsity"]))
    problems = []
    if key != "_".join((ap_key, *parts)) or model["sparsity"] not in SPARSITIES[model["structure"]]:
        problems.append(f"{ERROR}{key}: the key does not say what the model is")
    problems += [f"{ERROR}{key}: {text}" for text in _wrong_checkpoint(folder, model)]
    problems += _wrong_numbers(model)
    problems += [f"{ERROR}{key}: {text}" for text in _wrong_distances(folder, model)]
    if texts.results(model) not in issue or key not in issue:
        problems.append(f"{ERROR}{key}: ISSUE.md does not have its numbers")
    if model["normalisation"]:
        problems.append(f"{WARNING}{key}: needs normalisation, which the base models lack: declared in the issue")
    if model["structure"] == "S":
        problems.append(f"{WARNING}{key}: its sparsity is the share of pruned weights, not of channels")
    return problems


def _wrong_checkpoint(folder: Path, model: Mapping[str, Any]) -> list[str]:
    path = folder / "checkpoints" / f"{model['key']}.pt"
    try:
        content = load_state(path)
    except HarpError:
        return ["its checkpoint is missing or damaged"]
    state = content.get("state_dict")
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        return ["its checkpoint has no state_dict of tensors"]
    wrong = _unlike(state, shapes(model["architecture"]))
    if wrong:
        return [f"its checkpoint does not load strictly: {wrong}"]
    problems = []
    kept, size = _count(state)
    is_met = _at_level(100 * (1 - kept / size), model["sparsity"], model["structure"])
    if kept != model["kept"] or not is_met:
        problems.append(f"its checkpoint has {kept:,} of {size:,} weights, not {100 - model['sparsity']} %")
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        problems.append("its checkpoint holds NaN or infinity")
    if _sha256(path) != model["sha256"]:
        problems.append("its checkpoint is not the one that was prepared (sha256)")
    return problems


def _wrong_numbers(model: Mapping[str, Any]) -> list[str]:
    key, problems = model["key"], []
    missing = {"clean": "accuracy on clean images", "autoattack": f"AutoAttack at epsilon {EPSILON}"}
    missing["fmn"] = "L-inf distances of FMN"
    for name, words in missing.items():
        claim = model[name]
        if claim is None:
            problems.append(f"{ERROR}{key}: no {words} was measured (`harp evaluate` the run, then prepare again)")
        elif not 0 <= claim["value"] <= 100 or claim["n"] < 1:
            problems.append(f"{ERROR}{key}: {words} is {claim['value']!r} on {claim['n']!r} images")
        elif name != "fmn" and (claim["n"] != TESTED or model["dataset"] == "SVHN"):
            text = f"{words} on {claim['n']:,} images drawn from the test set, the benchmark takes its first {TESTED:,}"
            problems.append(f"{WARNING}{key}: {text}")
    clean, attacked = model["clean"], model["autoattack"]
    if clean and attacked and clean["n"] == attacked["n"] and attacked["value"] > clean["value"]:
        problems.append(f"{ERROR}{key}: the accuracy under AutoAttack is above the clean one")
    return problems


def _wrong_distances(folder: Path, model: Mapping[str, Any]) -> list[str]:
    if model["fmn"] is None:
        return []
    path = folder / "distances" / f"{model['key']}.pickle"
    try:
        # Read by our own unpickler, which runs nothing: also a file that somebody has put there instead.
        found = unpickle(Payload(path.name, path.read_bytes()), "a list of floats")
        twin = read_json(path.with_suffix(".json"))
    except (OSError, HarpError):
        return ["its distances are missing or damaged"]
    if not isinstance(found, list) or not found or not all(type(v) is float and v >= 0 for v in found):
        return ["its distances are not a list of floats from 0 up"]
    if [None if math.isinf(value) else value for value in found] != twin:
        return ["its distances differ between the pickle and the JSON file"]
    if len(found) != model["fmn"]["n"] or abs(100 * robust_share(found) - model["fmn"]["value"]) > 1e-9:
        return ["its distances do not give the accuracy that is claimed"]
    return []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
