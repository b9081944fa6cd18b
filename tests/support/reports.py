"""Folders of finished runs with every kind of record."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import torch
import yaml

from harp.pruning import masks
from harp.system.tensors import save_tensors

HOSTILE = "<script>alert('x')</script>"
CLASSES = ["cat", "dog", "owl", HOSTILE]


def accuracy(name: str, value: float, n: int = 2000, epsilon: float | None = None, **more: Any) -> dict[str, Any]:
    attack = None if epsilon is None else {"type": "Pgd", "epsilon": epsilon, "norm": "linf"}
    right = [round(n / 4 * min(1.0, value * factor)) for factor in (1.1, 1.0, 0.5, 1.0)]
    found = {"name": name, "value": value, "low": max(0.0, value - 0.02), "high": value + 0.02, "n": n}
    found |= {"measure": "accuracy", "attack": attack, "correct": right, "totals": [n // 4] * 4, "seed": 0}
    return {**found, "versions": {"harp": "1.2.3", "torch": "2.9"}, "data": "toys", **more}


def evaluation(value: float) -> dict[str, dict[str, Any]]:
    """Every kind of file that an evaluation may leave."""
    image = bytes(range(48))
    attacked = bytes(min(255, pixel + 8) for pixel in image)
    item = {"index": 7, "label": 0, "before": 0, "after": 3, "image": base64.b64encode(image).decode()}
    item["attacked"] = base64.b64encode(attacked).decode()
    parts = [
        {"attack": "apgd-ce-100", "words": "cross entropy", "tried": 1000, "fooled": 400, "left": 600, "seconds": 12.0},
        {"attack": "square-5000", "words": "random search", "tried": 600, "fooled": 3, "left": 597, "seconds": 99.0},
    ]
    aa = accuracy("autoattack", value - 0.05, 1000, 8 / 255, parts=parts, during=value - 0.04, classes=CLASSES)
    points = [
        {"epsilon": e / 255, "value": max(0.0, value - e / 40), "low": 0.0, "high": 0.9, "n": 500} for e in range(9)
    ]
    rows = [
        {"corruption": name, "severity": severity, "value": value - severity / 20, "low": 0.1, "high": 0.9, "n": 100}
        for name in ("fog", "gaussian noise")
        for severity in (1, 3)
    ]
    flips = {"n": 100, "both_right": 60, "lost": 15, "won": 5, "both_wrong": 20, "changed": 30, "classes": CLASSES}
    flips["examples"] = [{"index": 5, "label": 1, "dense": 1, "pruned": 2}]
    finding = {"check": "gradients", "verdict": "bad", "text": "3 of 64 images have a gradient of zero"}
    return {
        "aa": {"kind": "accuracy", **aa},
        "curve": {"kind": "curve", "attack": "pgd-10", "norm": "linf", "points": points},
        "distances": {
            "kind": "distances",
            "attack": "fmn",
            "norm": "l2",
            "median": 0.5,
            "values": [0.0, 0.2, 0.5, None],
        },
        "checks": {
            "kind": "checks",
            "findings": [finding, {"check": "inputs", "verdict": "good", "text": "in [0, 1]"}],
        },
        "corruptions": {"kind": "corruptions", "rows": rows, "mean": value - 0.1},
        "flips": {"kind": "flips", **flips},
        "examples": {"kind": "examples", "attack": "pgd-20", "epsilon": 0.1, "shape": [3, 4, 4], "items": [item]}
        | {"classes": CLASSES},
    }


def make_run(
    root: Path,
    method: str = "harp",
    keep: float = 0.1,
    seed: int = 0,
    *,
    value: float = 0.5,
    name: str | None = None,
    layers: int = 3,
    epochs: int = 4,
    evaluated: bool = True,
    options: dict[str, Any] | None = None,
    data: str = "toys",
    model: str = "net",
) -> Path:
    """A run's folder as `harp run` leaves it, with what `harp evaluate` may add."""
    name = name or f"toy-{method}-{100 * (1 - keep):.4g}"
    folder = root / f"{name}-{seed}{zlib.crc32(f'{method}{keep}{options}{data}{model}'.encode()):08x}"
    (folder / "evaluation").mkdir(parents=True)
    pruner = {"name": method} if keep == 1 else {"name": method, "keep": keep, **(options or {})}
    stages = [{"name": "pretrain", "pruner": {"name": "dense"}, "epochs": epochs}]
    if keep < 1:
        stages += [{"name": "prune", "pruner": pruner, "epochs": epochs}]
    recipe = {
        "name": name,
        "seed": seed,
        "data": {"name": data},
        "model": {"name": model, "weights": "/home/me/a b/w.pt"},
    }
    recipe |= {"stages": stages, "evaluate": {"examples": 2000}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    sizes = [100 * (number + 1) for number in range(layers)]
    table = [
        {"name": f"block{i}.conv.weight", "size": size, "kept": round(keep * size)} for i, size in enumerate(sizes)
    ]
    generator = torch.Generator().manual_seed(seed)
    weights, kept = {}, {}
    for layer in table:
        mask = masks.at_random(torch.ones(layer["size"]), layer["kept"], generator)
        weights[layer["name"]] = torch.randn(layer["size"], generator=generator) * mask
        kept[layer["name"]] = mask
    save_tensors(folder / "model.safetensors", weights)
    masks.save(folder / "masks.safetensors", kept)
    history = [
        {"epoch": e + 1, "loss": 2 - e / 5, "gamma": 0.01 * e, "budget_loss": max(0.0, 0.5 - e / 4), "ready": e > 1}
        | {"natural": 0.5 + e / 20, "robust": 0.3 + e / 20}
        for e in range(epochs)
    ]
    for stage in stages:
        path = root / "stages" / f"abc-{seed}-{stage['name']}-{folder.name}" / "stage.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"stage": stage["name"], "epochs": epochs, "chosen_epoch": epochs, "seconds": 120.0, "history": history}
        energy = {"kwh": 0.25, "co2_g": 90.0, "by": "RAPL"}
        path.write_text(json.dumps({**facts, "energy": energy}))
    summary = {"recipe": f"{seed:012d}", "name": name, "source": "/home/me/my data/toys; checksums agree"}
    summary["stages"] = [f"stages/abc-{seed}-{stage['name']}-{folder.name}" for stage in stages]
    summary["results"] = [accuracy("natural", value + 0.2), accuracy("pgd-20", value, epsilon=8 / 255)]
    summary["dense"] = [accuracy("natural", 0.8), accuracy("pgd-20", 0.6, epsilon=8 / 255)] if keep < 1 else []
    summary["layers"] = table
    summary["cost"] = {"macs": 4_000_000, "macs_kept": 80_000, "parameters": 700, "parameters_kept": 170}
    summary["cost"] |= {"bytes_dense": 2800, "bytes_sparse": 500}
    (folder / "summary.json").write_text(json.dumps(summary))
    for kind, content in evaluation(value).items() if evaluated else ():
        (folder / "evaluation" / f"{kind}.json").write_text(json.dumps(content))
    return folder


def many(root: Path) -> list[Path]:
    """Ten runs of twenty layers."""
    return [
        make_run(root, method, keep, seed, value=0.6 - 0.1 * (keep < 0.05) - 0.02 * seed, layers=20, epochs=30)
        for method in ("harp", "hydra")
        for keep in (0.1, 0.01)
        for seed in (0, 1)
    ] + [make_run(root, "dense", 1.0, seed, value=0.62, layers=20) for seed in (0, 1)]
