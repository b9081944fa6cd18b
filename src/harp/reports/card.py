"""The card of a model: what it is, how it was made, what was measured, and what that does not say.

The headings are those of Mitchell et al., "Model Cards for Model Reporting", FAT* 2019, with the front matter that
model hubs read. The words are in `templates/model_card.md`. Everything is taken from the run's folder; no path of the
machine gets into the card.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harp.data.registry import facts
from harp.evaluation import accuracy_drop, chance_level
from harp.evaluation.score import epsilon_text
from harp.experiments import artefact, run_folder
from harp.experiments.recipe import Stage
from harp.experiments.run_folder import Finished
from harp.models import MODELS
from harp.pruning.methods import PRUNERS
from harp.reports import templating
from harp.reports.templating import markdown_text
from harp.system import files
from harp.training import objectives

FILE = "MODEL_CARD.md"

_NORMS = {"linf": "L∞", "l2": "L2"}
_TAGS = {"weights": "sparsity", "channels": "structured-pruning"}


def write(run: str | Path) -> Path:
    """Write the card of a finished run beside its model, and return its path."""
    path = Path(run) / FILE
    files.write_text(path, card(run))
    return path


def card(run: str | Path, license: str | None = None) -> str:
    """The card of a finished run, in Markdown; its licence is for whoever publishes it to state."""
    finished = run_folder.read(run)
    recipe, summary, results, known = (
        finished.recipe,
        finished.summary,
        _results(finished),
        facts(finished.recipe.data.name),
    )
    layers, findings = summary["layers"], [one for check in finished.of_kind("checks") for one in check["findings"]]
    versions = [result["versions"] for result in finished.results if result.get("versions")]
    shape, names = finished.shape, finished.class_names
    return templating.render(
        "model_card.md",
        run=finished,
        front_matter=_front_matter(finished, results, license),
        license=license,
        architecture=_architecture(finished),
        cut=artefact.cut_of(finished.folder),
        method=_method(finished),
        input_size="x".join(map(str, (*shape[1:], shape[0]))) if shape else "the size of the data set's",
        normalize=recipe.model.normalize,
        kind=recipe.units.kind,
        layers=len(layers),
        units=sum(int(layer["size"]) for layer in layers),
        units_kept=sum(int(layer["kept"]) for layer in layers),
        versions="; ".join(dict.fromkeys(", ".join(f"{name} {one[name]}" for name in one) for one in versions)),
        weights=None if recipe.model.weights is None else Path(recipe.model.weights).name,
        stages=[_stage(finished, stage) for stage in recipe.stages],
        data=recipe.data,
        chosen=any(stage.select == "best" for stage in recipe.stages),
        measure=summary["results"][0].get("measure", "accuracy"),
        threats=sorted({f"{_norm(r['attack'])} with epsilon {epsilon_text(r)}" for r in results if r.get("attack")}),
        source=meaningful(str(summary.get("source", ""))),
        test_images=None if known is None else known.test,
        class_names=names if names != tuple(map(str, range(finished.classes))) and len(names) <= 20 else (),
        rows=_rows(finished, results),
        worst_classes=[worst for result in results for worst in _worst_class(finished, result)],
        distances=[_distances(record) for record in finished.of_kind("distances") if record["values"]],
        corruptions=[one for one in finished.of_kind("corruptions") if one.get("mean") is not None],
        fewest=min(sum(result["totals"]) for result in results),
        autoattack=any(re.split("[,@]", str(result["name"]))[0] == "autoattack" for result in finished.results),
        findings=findings,
        checked=bool(finished.of_kind("checks")),
        cost=summary.get("cost") or {},
        **_spent(finished),
        arguments=_arguments(finished),
    )


def meaningful(source: str) -> str:
    """Where data came from, without the place on somebody's disk."""
    kept = [part.strip() for part in source.split(";") if not re.search(r"[/\\]|^\s*[A-Za-z]:|\.npz\s*$", part)]
    return "; ".join(part for part in kept if part)


def _results(finished: Finished) -> list[Mapping[str, Any]]:
    """The accuracies of the card: each attack and epsilon once, on the most images, without the points of curves."""
    chosen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for result in finished.results:
        attack = result.get("attack") or {}
        key = (result["name"], attack.get("epsilon"), attack.get("norm"))
        if "@" not in str(result["name"]) and sum(result["totals"]) >= sum(chosen.get(key, {"totals": [0]})["totals"]):
            chosen[key] = result
    return list(chosen.values())


def _front_matter(finished: Finished, results: list[Mapping[str, Any]], license: str | None) -> str:
    metrics = []
    for result in results:
        attack = result.get("attack")
        threat = f", {_norm(attack)}, epsilon {epsilon_text(result)}" if attack else ""
        name = f"{result.get('measure', 'accuracy')}, {result['name']}{threat}"
        metrics.append({"type": "accuracy", "name": name, "value": round(100 * result["value"], 2)})
    known = facts(finished.recipe.data.name)
    remark = accuracy_drop.remark(finished.summary["results"], finished.summary.get("dense") or [])
    failed = [remark.replace(" ", "-")] if remark else []
    entry = {"task": {"type": "image-classification"}, "dataset": {"name": finished.data, "type": finished.data}}
    content = {
        "license": license or "unknown",
        "library_name": "harp",
        "pipeline_tag": "image-classification",
        "tags": ["pruning", _TAGS[finished.recipe.units.kind], "adversarial-robustness", "pytorch", *failed],
        "datasets": [known.hub] if known is not None and known.hub else [],
        "metrics": ["accuracy"],
        "model-index": [{"name": finished.recipe.name, "results": [{**entry, "metrics": metrics}]}],
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _norm(attack: Mapping[str, Any]) -> str:
    norm = str(attack.get("norm", "linf"))
    return _NORMS.get(norm, norm)


def _model_name(finished: Finished) -> str:
    """The name of the model without the folder of its file."""
    file, colon, function = finished.recipe.model.name.rpartition(":")
    return f"{Path(file).name}:{function}" if colon and file.endswith(".py") else finished.recipe.model.name


def _architecture(finished: Finished) -> str:
    name = _model_name(finished)
    options = ", ".join(f"{key} {value}" for key, value in finished.recipe.model.options.items())
    described = f" – {MODELS[name].description}" if name in MODELS and not options else ""
    return f"`{name}`" + (f" with {markdown_text(options)}" if options else "") + described


def _arguments(finished: Finished) -> str:
    """The arguments of `harp.build_model`."""
    part = finished.recipe.model
    options = {"normalize": part.normalize, **part.options} if part.normalize is not None else part.options
    shape = finished.shape or "(CHANNELS, HEIGHT, WIDTH)"
    texts = [f"{_model_name(finished)!r}", f"num_classes={finished.classes}", f"shape={shape}"]
    return ", ".join([*texts, *(f"{key}={value!r}" for key, value in options.items())])


def _title(stage: Stage) -> str:
    name = stage.pruner["name"]
    return markdown_text(PRUNERS[name].title or name)


def _method(finished: Finished) -> dict[str, str] | None:
    """Title, budget and paper of the method; None for a dense network."""
    if finished.pruning is None:
        return None
    title, method = _title(finished.pruning), PRUNERS[finished.pruning.pruner["name"]]
    source = f"{title}, no paper."
    if method.paper is not None:
        link = f" ({method.paper.link})" if method.paper.link else ""
        ours = " Departures from the authors' code are listed in HARP's source." * method.__module__.startswith("harp.")
        source = f"{title} – {markdown_text(method.paper)}{link}.{ours}"
    keep = finished.pruning.pruner.get("keep")
    budget = f"{keep:.4g} of the {finished.unit}" if keep is not None else "none: the method chose it"
    return {"title": title, "budget": budget, "source": source}


def _stage(finished: Finished, stage: Stage) -> str:
    """A stage of the training in words."""
    channels = finished.recipe.units.kind == "channels"
    options = dict(stage.pruner)
    pruner = options.pop("name")
    if pruner == "dense":
        task = "dense"
    elif pruner == "fixed":
        task = "fine-tuning of the smaller network" if channels else "fine-tuning under the masks found before"
    else:
        words = ", ".join(f"{key} {_number(value)}" for key, value in options.items())
        what = "pruning of channels" if channels else "pruning"
        task = f"{what} by {_title(stage)}" + (f" ({markdown_text(words)})" if words else "")
    rate = f"{stage.optimizer.name}, learning rate {stage.optimizer.lr:g}, {stage.optimizer.schedule['name']} schedule"
    return f"**{markdown_text(stage.name)}**: {stage.epochs} epochs, {task}; {_objective(finished, stage)}; {rate}"


def _objective(finished: Finished, stage: Stage) -> str:
    """The objective of a stage, its paper, and the attack that it trains against."""
    options = dict(finished.recipe.stage_objective(stage))
    name = options.pop("name")
    kind = objectives.OBJECTIVES[name]
    title = kind.title or name
    title = f"{title} ({kind.paper.cited} {kind.paper.year})" if kind.paper else title
    if name == "natural":
        return title
    made = objectives.made({"name": name, **options})
    epsilon = options.pop("epsilon", getattr(made, "epsilon", None))
    norm = _NORMS.get(options.pop("norm", "linf"), "")
    options.pop("fast", None)
    lengths: dict[str, Any] = {
        key: getattr(made, key) for key in ("steps", "replays") if key in objectives.options(name)
    }
    words = [f"{key} {_number(value)}" for key, value in {**lengths, **options}.items() if value is not None]
    return f"{title} ({norm}, epsilon {epsilon_text({'attack': {'epsilon': epsilon}})}, {', '.join(words)})"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rows(finished: Finished, results: list[Mapping[str, Any]]) -> list[list[str]]:
    """The table of accuracies."""
    dense = finished.summary.get("dense") or []
    dropped = [now for _, now in accuracy_drop.large(results, dense)]
    before = {(r["name"], (r.get("attack") or {}).get("epsilon")): f"{r['value']:.1%}" for r in dense}
    rows = []
    for result in results:
        attack = result.get("attack") or {}
        threat = f"{_norm(attack)}, {epsilon_text(result)}" if attack else "–"
        interval = f"{result['low']:.1%} – {result['high']:.1%}" if "low" in result and "high" in result else "–"
        old = before.get((result["name"], attack.get("epsilon")), "–")
        counts = [f"{sum(result['totals']):,}", str(result.get("seed", "–"))]
        at_chance = not attack and chance_level.result_at_chance(result)
        mark = f" ({accuracy_drop.CHANCE})" if at_chance else " (large drop)" if result in dropped else ""
        value = f"**{result['value']:.1%}{mark}**" if mark else f"{result['value']:.1%}"
        rows.append([markdown_text(result["name"]), threat, old, value, interval, *counts])
    return rows


def _worst_class(finished: Finished, result: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Test, name and accuracy of the worst class; empty unless there are several."""
    counts = zip(result["correct"], result["totals"], finished.class_names, strict=True)
    shares = [(right / n, name) for right, n, name in counts if n]
    if len(shares) < 2:
        return []
    share, name = min(shares)
    return [(result["name"], name, share)]


def _distances(record: Mapping[str, Any]) -> dict[str, Any]:
    values = sorted(math.inf if value is None else value for value in record["values"])
    median = values[len(values) // 2]
    return {
        "attack": record.get("attack", "a minimum-norm attack"),
        "norm": _NORMS.get(record["norm"], record["norm"]),
        "median": "not finished" if math.isinf(median) else f"{median:.4g}",
        "images": len(values),
        "never": sum(map(math.isinf, values)),
    }


def _spent(finished: Finished) -> dict[str, Any]:
    """Time, energy and CO2 of all stages."""
    stages = [stage.facts or {} for stage in finished.stages]
    energy = [stage.get("energy") or {} for stage in stages]
    return {
        "seconds": sum(float(stage.get("seconds") or 0) for stage in stages),
        "kwh": sum(float(one.get("kwh") or 0) for one in energy),
        "grams": sum(float(one.get("co2_g") or 0) for one in energy),
        "measured_by": next((str(one["by"]) for one in reversed(energy) if one.get("by")), ""),
    }
