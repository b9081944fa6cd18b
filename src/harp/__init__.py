"""HARP: holistic adversarially robust pruning.

units = harp.Weights(model)
pruner = harp.Harp(units, keep=0.01)
harp.fit(model, batches, harp.PgdTraining(), pruner, epochs=20, lr=0.1)
harp.fit(model, batches, harp.PgdTraining(), harp.Fixed(units, pruner.masks()), epochs=100, lr=0.01)
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Names are loaded when they are first used: `harp --help` must not wait for torch.
_HOMES = {
    "Admm": "harp.pruners",
    "AnpVs": "harp.pruners",
    "Augment": "harp.batches",
    "Batches": "harp.batches",
    "BcsP": "harp.pruners",
    "CwInf": "harp.attacks",
    "Dense": "harp.pruners",
    "Dnr": "harp.pruners",
    "Dynamic": "harp.pruners",
    "Erk": "harp.pruners",
    "FastTraining": "harp.objectives",
    "Fgsm": "harp.attacks",
    "Fixed": "harp.pruners",
    "Fitted": "harp.training",
    "FlyingBird": "harp.pruners",
    "FlyingBirdPlus": "harp.pruners",
    "FreeTraining": "harp.free",
    "GlobalMagnitude": "harp.pruners",
    "Harp": "harp.pruners",
    "HarpError": "harp.errors",
    "HarpRates": "harp.pruners",
    "HarpScores": "harp.pruners",
    "Hydra": "harp.pruners",
    "Lamp": "harp.pruners",
    "Mad": "harp.pruners",
    "Magnitude": "harp.pruners",
    "Mart": "harp.objectives",
    "Natural": "harp.objectives",
    "Pgd": "harp.attacks",
    "PgdTraining": "harp.objectives",
    "Plan": "harp.pruners",
    "Pruner": "harp.pruners",
    "Random": "harp.pruners",
    "Trades": "harp.objectives",
    "Tandem": "harp.pruners",
    "TwinRep": "harp.pruners",
    "Weights": "harp.units",
    "accuracy": "harp.evaluate",
    "apply_masks": "harp.masks",
    "build_model": "harp.models",
    "fit": "harp.training",
    "holdout": "harp.data",
    "launch": "harp.processes.engine",
    "load": "harp.sparse.loading",
    "load_data": "harp.data",
    "load_masks": "harp.masks",
    "load_weights": "harp.checkpoint",
    "peers": "harp.processes.peers",
    "save_masks": "harp.masks",
    "save_model": "harp.checkpoint",
}
_INNER = {
    "apply_masks": "apply",
    "build_model": "build",
    "load_data": "load",
    "load_masks": "load",
    "peers": "of_this_run",
    "save_masks": "save",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'harp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), _INNER.get(name, name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
