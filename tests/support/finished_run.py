"""Folders as `harp run` leaves them, made without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harp import models
from harp.data import registry as data_sets
from harp.experiments import artefact, recipe
from harp.pruning import macs
from harp.pruning.channels import Channels
from harp.pruning.methods import Magnitude
from harp.pruning.units import Units, Weights
from harp.system import files

CLASSES = {"cifar10": 10, "cifar100": 100, "svhn": 10, "fashion": 10, "digits": 10}


def content(
    *,
    data: str = "cifar10",
    model: Mapping[str, Any] | str = "resnet18",
    method: str = "harp",
    keep: float | None = 0.1,
    objective: str = "pgd",
    **more: Any,
) -> dict[str, Any]:
    """A recipe: pre-training, pruning, fine-tuning."""
    stages: list[dict[str, Any]] = [{"name": "pretrain", "pruner": "dense", "epochs": 3}]
    if keep is not None:
        stages.append({"name": "prune", "pruner": {"name": method, "keep": keep}, "epochs": 2})
        stages.append({"name": "finetune", "pruner": "fixed", "epochs": 3})
    parts = {"data": {"name": data}, "model": model, "objective": objective, "stages": stages}
    return {"name": "made", "seed": 7, **parts, **more}


def score(name: str, right: int, n: int, epsilon: float | None = None, **more: Any) -> dict[str, Any]:
    """A measured number of ten classes, the first of which is the worst."""
    totals = [n // 10] * 10
    correct = [right // 10] * 10
    correct[0], correct[1] = correct[0] - 1, correct[1] + 1
    attack = None if epsilon is None else {"type": "X", "epsilon": epsilon, "norm": "linf"}
    value = right / n
    facts = {"name": name, "n": n, "accuracy": value, "value": value, "low": value - 0.01, "high": value + 0.01}
    versions = {"harp": "0.1.0", "torch": "2.0"}
    return {
        **facts,
        "correct": correct,
        "totals": totals,
        "attack": attack,
        "seed": 7,
        "versions": versions,
        "data": "cifar10",
    } | more


def make(
    folder: Path,
    made: Mapping[str, Any],
    *,
    results: Sequence[Mapping[str, Any]] = (),
    evaluation: Sequence[Mapping[str, Any]] = (),
    shape: tuple[int, int, int] | None = None,
) -> nn.Module:
    """Write the folder of a run whose network is drawn at random and pruned by magnitude; give the network."""
    parsed = recipe.parse(made)
    part = parsed.model
    size = shape or data_sets.DATASETS[parsed.data.name].facts.shape  # type: ignore[union-attr]
    classes = CLASSES.get(parsed.data.name, 10)
    torch.manual_seed(0)
    model = models.build(part.name, num_classes=classes, shape=size, normalize=part.normalize, **part.options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(std=0.1)
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    options = parsed.units.options()
    units: Units = Weights(model)
    if parsed.units.kind == "channels":
        units = Channels(model, torch.rand(2, *size, generator=torch.Generator().manual_seed(0)), **options)
    keeps = [stage.pruner["keep"] for stage in parsed.stages if "keep" in stage.pruner]
    pruner = Magnitude(units, keeps[-1]) if keeps else None
    answer = None if pruner is None else pruner.finish()
    before, cut = macs.cost(model, size, {}), None
    if isinstance(units, Channels) and answer is not None:
        cut, model = units.cut(answer), units.slim(model, answer)
    artefact.save(folder, model, answer, None, units, cut)
    files.write_text(folder / "recipe.yaml", parsed.to_yaml())
    numbers = list(results) or [score("natural", 8000, 10_000), score("pgd-20", 4500, 10_000, 8 / 255)]
    summary = {"recipe": "0123456789ab", "name": parsed.name, "source": "/home/someone/data/x; checksums agree"}
    found: dict[str, Any] = {"stages": [], "results": numbers, "dense": [], "layers": artefact.layers(units, answer)}
    if cut is not None:
        found |= {"budget": artefact.budget(units, answer, None)}
        found |= {"cost": macs.reduced(before, macs.cost(model, size, {}))}
    files.write_json(folder / "summary.json", summary | found)
    for number, measured in enumerate(evaluation):
        files.write_json(folder / "evaluation" / f"{number}.json", measured)
    return model.eval()


def accuracy(name: str, right: int, n: int, epsilon: float | None = None, **more: Any) -> dict[str, Any]:
    """A number that was measured later."""
    return {"kind": "accuracy", **score(name, right, n, epsilon, **more)}


def distances(values: Sequence[float | None], norm: str = "linf") -> dict[str, Any]:
    return {"kind": "distances", "attack": "fmn", "norm": norm, "median": 0.03, "values": list(values)}


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
