"""The card of a model: what it is, how it was made, what was measured, and what that does not say.

The headings are those of Mitchell et al., "Model Cards for Model Reporting", FAT* 2019, with the front matter that
model hubs read. Everything is taken from the run's folder; no path of the machine gets into it.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harp.data.registry import facts
from harp.evaluation.score import epsilon_text
from harp.experiments import artefact, run_folder
from harp.experiments.recipe import Stage
from harp.experiments.run_folder import Finished
from harp.models import MODELS
from harp.pruning.methods import PRUNERS
from harp.reports.card.loading import loading
from harp.reports.card.markdown import plain, table
from harp.system import files
from harp.training import objectives

FILE = "MODEL_CARD.md"

_NORMS = {"linf": "L∞", "l2": "L2"}
_TAGS = {"weights": "sparsity", "channels": "structured-pruning"}


def write(run: str | Path) -> Path:
    """Write the card of a finished run beside its model, and say where."""
    path = Path(run) / FILE
    files.write_text(path, card(run))
    return path


def card(run: str | Path) -> str:
    """The card of a finished run, in Markdown."""
    found = run_folder.read(run)
    parts = [
        _front_matter(found),
        f"# {plain(found.recipe.name)}",
        _what(found),
        "## Model details\n\n" + _details(found),
        "## How it was trained\n\n" + _training(found),
        "## Intended use\n\n" + _use(found),
        "## Factors and metrics\n\n" + _metrics(found),
        "## Training and evaluation data\n\n" + _data(found),
        "## Quantitative analyses\n\n" + _analyses(found),
        "## Caveats and recommendations\n\n" + _caveats(found),
        "## How to load it\n\n" + loading(found),
    ]
    cost = _cost(found)
    if cost:
        parts.insert(-1, "## Cost\n\n" + cost)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def meaningful(source: str) -> str:
    """Where data came from, without the place on somebody's disk."""
    kept = [part.strip() for part in source.split(";") if not re.search(r"[/\\]|^\s*[A-Za-z]:|\.npz\s*$", part)]
    return "; ".join(part for part in kept if part)


def rows(found: Finished) -> list[Mapping[str, Any]]:
    """The numbers worth a line: each attack and epsilon once, on the most images; the points of curves are left out."""
    chosen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for result in found.results:
        attack = result.get("attack") or {}
        key = (result["name"], attack.get("epsilon"), attack.get("norm"))
        if "@" not in str(result["name"]) and sum(result["totals"]) >= sum(chosen.get(key, {"totals": [0]})["totals"]):
            chosen[key] = result
    return list(chosen.values())


def _front_matter(found: Finished) -> str:
    metrics = [
        {"type": "accuracy", "name": _title(result), "value": round(100 * result["value"], 2)} for result in rows(found)
    ]
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": found.data, "type": found.data},
        "metrics": metrics,
    }
    content = {
        "license": "unknown",
        "library_name": "harp",
        "pipeline_tag": "image-classification",
        "tags": ["pruning", _TAGS[found.recipe.units.kind], "adversarial-robustness", "pytorch"],
        "datasets": [known.hub] if (known := facts(found.data)) is not None and known.hub else [],
        "metrics": ["accuracy"],
        "model-index": [{"name": found.recipe.name, "results": [result]}],
    }
    return "---\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True) + "---"


def _title(result: Mapping[str, Any]) -> str:
    attack = result.get("attack")
    where = f", {_norm(attack)}, epsilon {epsilon_text(result)}" if attack else ""
    return f"{result.get('measure', 'accuracy')}, {result['name']}{where}"


def _norm(attack: Mapping[str, Any]) -> str:
    norm = str(attack.get("norm", "linf"))
    return _NORMS.get(norm, norm)


def _architecture(found: Finished) -> str:
    part = found.recipe.model
    file, colon, function = part.name.rpartition(":")
    name = f"{Path(file).name}:{function}" if colon and file.endswith(".py") else part.name
    options = ", ".join(f"{key} {value}" for key, value in part.options.items())
    described = f" – {MODELS[name].description}" if name in MODELS and not options else ""
    return f"`{name}`" + (f" with {plain(options)}" if options else "") + described


def _what(found: Finished) -> str:
    made = f"pruned by {_title_of(found.pruning)}" if found.pruning else "dense (not pruned)"
    line = f"A classifier of {found.classes} classes for {plain(found.data)}, {_architecture(found)}, {made}. "
    line += f"It keeps {found.kept:,} of {found.size:,} {found.unit} ({found.kept / found.size:.3%})."
    if artefact.cut_of(found.folder) is not None:
        line += " What was pruned is not there any more: whole channels were cut out of its tensors."
    description = plain(found.recipe.description)
    first, *others = [description, line] if description else [line]
    return "\n\n".join([first, *(f"> **Warning:** {plain(warning)}" for warning in found.warnings), *others])


def _title_of(stage: Stage) -> str:
    """What the method of a stage is called."""
    name = stage.pruner["name"]
    return plain(PRUNERS[name].title or name)


def _source(stage: Stage) -> str:
    """Where the method of a stage was published."""
    method = PRUNERS[stage.pruner["name"]]
    if method.paper is None:
        return f"Method: {_title_of(stage)}, no paper."
    link = f" ({method.paper.link})" if method.paper.link else ""
    ours = " Departures from the authors' code are listed in HARP's source." * method.__module__.startswith("harp.")
    return f"Method: {_title_of(stage)} – {plain(str(method.paper))}{link}.{ours}"


def _details(found: Finished) -> str:
    shape = found.shape
    normalize = found.recipe.model.normalize
    size = "x".join(map(str, (shape[1], shape[2], shape[0]))) if shape else "the size of the data set's"
    inside = f"; normalisation inside: mean {normalize[0]}, std {normalize[1]}" if normalize else ""
    lines = [
        f"- **Architecture**: {_architecture(found)}",
        f"- **Input**: images of {size}, values in [0, 1]{inside}",
        f"- **Output**: {found.classes} logits",
        *_kept(found),
    ]
    if found.pruning is not None:
        keep = found.pruning.pruner.get("keep")
        asked = f"{keep:.4g} of the {found.unit}" if keep is not None else "none: the method chose it"
        lines.append(f"- **Budget asked for**: {asked}")
    lines.append(
        f"- **Seed**: {found.recipe.seed}; **recipe**: `{found.summary.get('recipe', 'unknown')}`, in `recipe.yaml`"
    )
    versions = _versions(found)
    if versions:
        lines.append(f"- **Versions**: {versions}")
    lines.append("- **Licence**: unknown; whoever publishes this model states it here")
    return "\n".join(lines)


def _kept(found: Finished) -> list[str]:
    """What is left, of what the budget counts and of the units that were pruned."""
    layers, kind = found.summary["layers"], found.recipe.units.kind
    size, kept = (sum(int(layer[key]) for layer in layers) for key in ("size", "kept"))
    whole = f"- **{found.unit[0].upper()}{found.unit[1:]} kept**: {found.kept:,} of {found.size:,}"
    if kind == "channels":
        groups = f"{len(layers)} group" + "s" * (len(layers) != 1)
        return [whole, f"- **Channels kept**: {kept:,} of {size:,} that may be pruned, in {groups}"]
    other = [] if found.unit == kind else [whole]
    return [
        *other,
        f"- **Weights kept**: {kept:,} of {size:,} in {len(layers)} layers; biases and norms are not counted and not "
        "pruned",
    ]


def _versions(found: Finished) -> str:
    """All versions that numbers were measured with: those of a later evaluation may be others."""
    told = [result["versions"] for result in found.results if result.get("versions")]
    texts = [", ".join(f"{name} {version}" for name, version in versions.items()) for versions in told]
    return "; ".join(dict.fromkeys(texts))


def _training(found: Finished) -> str:
    lines = [f"{number}. {_stage(found, stage)}" for number, stage in enumerate(found.recipe.stages, start=1)]
    if found.recipe.model.weights is not None:
        lines.insert(0, f"It starts from given weights (`{Path(found.recipe.model.weights).name}`).\n")
    data = found.recipe.data
    images = "all training images but those held out" if data.train is None else f"{data.train:,} training images"
    held = f"{data.holdout:,.0f} images" if data.holdout > 1 else f"{data.holdout:.0%} of the images"
    chosen = "the best" if any(stage.select == "best" for stage in found.recipe.stages) else "no"
    lines.append(
        f"\nBatches of {data.batch}; {images}; {chosen} epoch of a stage is chosen on {held} held out of the training "
        "set, never on the test set."
    )
    if found.pruning is not None:
        lines.append(f"\n{_source(found.pruning)}")
    return "\n".join(lines)


def _stage(found: Finished, stage: Stage) -> str:
    objective = dict(found.recipe.stage_objective(stage))
    name = objective.pop("name")
    threat = ""
    if name != "natural":
        made = objectives.made({"name": name, **objective})
        epsilon = objective.pop("epsilon", getattr(made, "epsilon", None))
        length: dict[str, Any] = {
            key: getattr(made, key) for key in ("steps", "replays") if key in objectives.options(name)
        }
        others = {**length, **{key: value for key, value in objective.items() if key not in ("norm", "fast")}}
        words = [f"{key} {_number(value)}" for key, value in others.items() if value is not None]
        norm = _NORMS.get(objective.get("norm", "linf"), "")
        threat = f" ({norm}, epsilon {epsilon_text({'attack': {'epsilon': epsilon}})}, {', '.join(words)})"
    pruner = dict(stage.pruner)
    kind = pruner.pop("name")
    channels = found.recipe.units.kind == "channels"
    tuning = "fine-tuning of the smaller network" if channels else "fine-tuning under the masks found before"
    does = {"dense": "dense", "fixed": tuning}.get(kind)
    if does is None:
        options = ", ".join(f"{key} {_number(value)}" for key, value in pruner.items())
        what = "pruning of channels" if channels else "pruning"
        does = f"{what} by {_title_of(stage)}" + (f" ({plain(options)})" if options else "")
    rate = f"{stage.optimizer.name}, learning rate {stage.optimizer.lr:g}, {stage.optimizer.schedule['name']} schedule"
    return f"**{plain(stage.name)}**: {stage.epochs} epochs, {does}; {_objective(name)}{threat}; {rate}"


def _objective(name: str) -> str:
    kind = objectives.OBJECTIVES[name]
    title = kind.title or name
    return f"{title} ({kind.paper.cited} {kind.paper.year})" if kind.paper else title


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _use(found: Finished) -> str:
    return (
        "For research on small networks that withstand adversarial perturbations, and for comparing pruning methods. "
        f"It knows nothing but the {found.classes} classes of {plain(found.data)}. Not for decisions about people, "
        "and not as the only safeguard of anything that somebody has a reason to attack."
    )


def _metrics(found: Finished) -> str:
    attacked = [result for result in rows(found) if result.get("attack")]
    balls = sorted({f"{_norm(r['attack'])} with epsilon {epsilon_text(r)}" for r in attacked})
    measure = plain(found.summary["results"][0].get("measure", "accuracy"))
    mean = " (the mean over the classes)" if measure.startswith("balanced") else ""
    threat = (
        f"The threat is a perturbation of each image, of values in [0, 1], within {'; '.join(balls)}." if balls else ""
    )
    return (
        f"The metric is {measure}{mean} on test images as they are (natural) and after an attack (robust), with 95 % "
        f"confidence intervals over images. {threat} Accuracy differs between classes: see the worst one below."
    )


def _data(found: Finished) -> str:
    source = meaningful(str(found.summary.get("source", "")))
    lines = [f"- **Data set**: {plain(found.data)}" + (f" ({plain(source)})" if source else "")]
    if (known := facts(found.data)) is not None:
        lines.append(f"- **Test set**: {known.test:,} images; how many were used is in the table")
    names = found.class_names
    if names != tuple(map(str, range(found.classes))) and len(names) <= 20:
        lines.append(f"- **Classes**: {', '.join(map(plain, names))}")
    return "\n".join(lines)


def _analyses(found: Finished) -> str:
    before = {
        (r["name"], (r.get("attack") or {}).get("epsilon")): f"{r['value']:.1%}"
        for r in found.summary.get("dense") or []
    }
    cells = []
    for result in rows(found):
        attack = result.get("attack") or {}
        threat = f"{_norm(attack)}, {epsilon_text(result)}" if attack else "–"
        interval = f"{result['low']:.1%} – {result['high']:.1%}" if "low" in result and "high" in result else "–"
        old = before.get((result["name"], attack.get("epsilon")), "–")
        counts = [f"{sum(result['totals']):,}", str(result.get("seed", "–"))]
        cells.append([plain(result["name"]), threat, old, f"{result['value']:.1%}", interval, *counts])
    text = [table(["test", "threat", "before pruning", "this model", "95 % interval", "images", "seed"], cells)]
    text += [line for result in rows(found) if (line := _worst(found, result))]
    for distances in found.of_kind("distances"):
        values = [math.inf if value is None else value for value in distances["values"]]
        if values:
            median, never = sorted(values)[len(values) // 2], sum(map(math.isinf, values))
            shown = "not found" if math.isinf(median) else f"{median:.4g}"
            norm = _NORMS.get(distances["norm"], distances["norm"])
            attack = plain(distances.get("attack", "a minimum-norm attack"))
            text.append(
                f"The nearest misclassified image that {attack} found is at a median {norm} distance of {shown} "
                f"({len(values):,} images, {never:,} never broken)."
            )
    for corrupted in found.of_kind("corruptions"):
        if corrupted.get("mean") is not None:
            files = plain(corrupted.get("files", "HARP's own set"))  # old results are of images that HARP corrupted
            text.append(f"On images with common corruptions ({files}) the mean accuracy is {corrupted['mean']:.1%}.")
    return "\n\n".join(text)


def _worst(found: Finished, result: Mapping[str, Any]) -> str:
    counts = zip(result["correct"], result["totals"], found.class_names, strict=True)
    shares = [(right / n, name) for right, n, name in counts if n]
    if len(shares) < 2:
        return ""
    share, name = min(shares)
    return f"Worst class, {plain(result['name'])}: {plain(name)}, {share:.1%}."


def _caveats(found: Finished) -> str:
    lines = [
        *(f"- {plain(warning)}" for warning in found.warnings),
        "- Robustness is shown for the stated attacks, norm and epsilon only. It says nothing of other norms, larger "
        "perturbations, patches, rotations or other changes of an image.",
        "- It is measured, not certified: a stronger attack may find more.",
    ]
    counts = {sum(result["totals"]) for result in rows(found)}
    known = facts(found.data)
    whole = None if known is None else known.test
    if whole is None or min(counts) < whole:
        of = "" if whole is None else f" of {whole:,}"
        lines.append(f"- Some numbers are on a subset ({min(counts):,}{of} test images): mind the intervals.")
    strongest = {re.split("[,@]", str(result["name"]))[0] for result in found.results}
    if "autoattack" not in strongest:
        lines.append("- AutoAttack was not run: the robust accuracy is likely lower than what is stated here.")
    checks = found.of_kind("checks")
    odd = [each for check in checks for each in check["findings"] if each.get("verdict") != "good"]
    lines += [
        f"- Check for false robustness, {plain(each.get('check', ''))} ({each.get('verdict')}): "
        f"{plain(each.get('text', ''))}"
        for each in odd
    ]
    if not odd:
        ran = (
            f"{sum(len(check['findings']) for check in checks)} ran, none found anything" if checks else "none were run"
        )
        lines.append(f"- Checks for false robustness: {ran}.")
    lines.append("- One seed: another one would give somewhat other numbers.")
    return "\n".join(lines)


def _cost(found: Finished) -> str:
    lines = []
    cost = found.summary.get("cost") or {}
    cut = artefact.cut_of(found.folder) is not None
    left = ("before pruning", "now") if cut else ("dense", "with weights that live")
    if {"macs", "macs_kept"} <= cost.keys():
        lines.append(f"- Multiplications an image: {cost['macs']:,} {left[0]}, {cost['macs_kept']:,} {left[1]}")
    if cut and {"parameters", "parameters_kept"} <= cost.keys():
        lines.append(f"- Parameters: {cost['parameters']:,} {left[0]}, {cost['parameters_kept']:,} {left[1]}")
    if {"bytes_dense", "bytes_sparse"} <= cost.keys():
        stored = "now, dense" if cut else "stored sparsely"
        about = "" if cut else "about "
        lines.append(f"- Size: {cost['bytes_dense']:,} bytes {left[0]}, {about}{cost['bytes_sparse']:,} {stored}")
    seconds, kwh, grams, by = 0.0, 0.0, 0.0, ""
    for stage in found.stages:
        facts = stage.facts or {}
        seconds += float(facts.get("seconds") or 0)
        energy = facts.get("energy") or {}
        kwh, grams = kwh + float(energy.get("kwh") or 0), grams + float(energy.get("co2_g") or 0)
        by = str(energy.get("by") or by)
    if seconds:
        lines.append(f"- Training time: {seconds:,.0f} s in all stages")
    if kwh:
        lines.append(f"- Energy of the training: {kwh:.3g} kWh, {grams:.3g} g of CO2 ({plain(by)})")
    return "\n".join(lines)
