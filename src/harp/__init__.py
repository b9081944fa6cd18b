"""HARP: holistic adversarially robust pruning.

pruner = harp.Harp(model, keep="1%")
harp.fit(model, batches, harp.PgdTraining(), pruner, epochs=20, lr=0.1)
harp.fit(model, batches, harp.PgdTraining(), harp.Fixed(model, pruner.masks()), epochs=100, lr=0.01)
"""

from importlib import import_module

__version__ = "0.1.0"

# For editors and type checkers, which know this name. `typing` itself would make every command wait, before Ctrl-C
# is quiet. A test holds these imports against the table below.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from harp.attacks import Apgd as Apgd
    from harp.attacks import ApgdDlr as ApgdDlr
    from harp.attacks import ApgdT as ApgdT
    from harp.attacks import Attack as Attack
    from harp.attacks import AutoAttack as AutoAttack
    from harp.attacks import AutoAttackLite as AutoAttackLite
    from harp.attacks import Ball as Ball
    from harp.attacks import CwInf as CwInf
    from harp.attacks import Fab as Fab
    from harp.attacks import Fgsm as Fgsm
    from harp.attacks import Fmn as Fmn
    from harp.attacks import Pgd as Pgd
    from harp.attacks import Square as Square
    from harp.data.batches import Augment as Augment
    from harp.data.batches import Batches as Batches
    from harp.data.registry import holdout as holdout
    from harp.data.registry import load as load_data
    from harp.deploy.export.api import export as export
    from harp.deploy.sharing import push as push
    from harp.engine.load import load as load
    from harp.errors import HarpError as HarpError
    from harp.evaluation.score import Score as Score
    from harp.evaluation.score import accuracy as accuracy
    from harp.experiments.compare import Comparison as Comparison
    from harp.experiments.compose import load as load_recipe
    from harp.experiments.recipe import Recipe as Recipe
    from harp.experiments.run import Run as Run
    from harp.experiments.run_folder import LoadedRun as LoadedRun
    from harp.experiments.run_folder import load_run as load_run
    from harp.experiments.study import load as load_study
    from harp.models import Normalized as Normalized
    from harp.models import build as build_model
    from harp.models import zoo as zoo
    from harp.models.weights import load_weights as load_weights
    from harp.models.weights import save_model as save_model
    from harp.pruning import schedules as schedules
    from harp.pruning.channels import Channels as Channels
    from harp.pruning.holding import hold as hold_masks
    from harp.pruning.holding import lift as lift_masks
    from harp.pruning.masks import apply as apply_masks
    from harp.pruning.masks import load as load_masks
    from harp.pruning.masks import save as save_masks
    from harp.pruning.methods import Admm as Admm
    from harp.pruning.methods import AnpVs as AnpVs
    from harp.pruning.methods import BcsP as BcsP
    from harp.pruning.methods import Dense as Dense
    from harp.pruning.methods import Dnr as Dnr
    from harp.pruning.methods import Dynamic as Dynamic
    from harp.pruning.methods import Erk as Erk
    from harp.pruning.methods import Fixed as Fixed
    from harp.pruning.methods import FlyingBird as FlyingBird
    from harp.pruning.methods import FlyingBirdPlus as FlyingBirdPlus
    from harp.pruning.methods import GlobalMagnitude as GlobalMagnitude
    from harp.pruning.methods import Harp as Harp
    from harp.pruning.methods import HarpRates as HarpRates
    from harp.pruning.methods import HarpScores as HarpScores
    from harp.pruning.methods import Hydra as Hydra
    from harp.pruning.methods import Lamp as Lamp
    from harp.pruning.methods import Latent as Latent
    from harp.pruning.methods import Mad as Mad
    from harp.pruning.methods import Magnitude as Magnitude
    from harp.pruning.methods import Plan as Plan
    from harp.pruning.methods import Pruner as Pruner
    from harp.pruning.methods import Random as Random
    from harp.pruning.methods import Tandem as Tandem
    from harp.pruning.methods import TwinRep as TwinRep
    from harp.pruning.papers import Criterion as Criterion
    from harp.pruning.papers import Locality as Locality
    from harp.pruning.papers import Paper as Paper
    from harp.pruning.papers import Taxonomy as Taxonomy
    from harp.pruning.units import Units as Units
    from harp.pruning.units import Weights as Weights
    from harp.reports.pictures import plot as plot
    from harp.system.distributed.fabric import launch as launch
    from harp.system.distributed.peers import of_this_run as peers
    from harp.training.base import Objective as Objective
    from harp.training.checkpointing import Keeper as Keeper
    from harp.training.free_at import FreeTraining as FreeTraining
    from harp.training.loop import Fitted as Fitted
    from harp.training.loop import fit as fit
    from harp.training.objectives import FastTraining as FastTraining
    from harp.training.objectives import Mart as Mart
    from harp.training.objectives import Natural as Natural
    from harp.training.objectives import PgdTraining as PgdTraining
    from harp.training.objectives import Trades as Trades

    # Imported under another name, these count as re-exported only if they are listed.
    __all__ = [
        "apply_masks",
        "build_model",
        "hold_masks",
        "lift_masks",
        "load_data",
        "load_masks",
        "load_recipe",
        "load_study",
        "peers",
        "save_masks",
    ]

# Names are loaded when they are first used: `harp --help` must not wait for torch.
_HOMES = {
    "Admm": "harp.pruning.methods",
    "AnpVs": "harp.pruning.methods",
    "Apgd": "harp.attacks",
    "ApgdDlr": "harp.attacks",
    "ApgdT": "harp.attacks",
    "Attack": "harp.attacks",
    "Augment": "harp.data.batches",
    "AutoAttack": "harp.attacks",
    "AutoAttackLite": "harp.attacks",
    "Ball": "harp.attacks",
    "Batches": "harp.data.batches",
    "BcsP": "harp.pruning.methods",
    "Channels": "harp.pruning.channels",
    "Comparison": "harp.experiments.compare",
    "Criterion": "harp.pruning.papers",
    "CwInf": "harp.attacks",
    "Dense": "harp.pruning.methods",
    "Dnr": "harp.pruning.methods",
    "Dynamic": "harp.pruning.methods",
    "Erk": "harp.pruning.methods",
    "Fab": "harp.attacks",
    "FastTraining": "harp.training.objectives",
    "Fgsm": "harp.attacks",
    "Fitted": "harp.training.loop",
    "Fixed": "harp.pruning.methods",
    "FlyingBird": "harp.pruning.methods",
    "FlyingBirdPlus": "harp.pruning.methods",
    "Fmn": "harp.attacks",
    "FreeTraining": "harp.training.free_at",
    "GlobalMagnitude": "harp.pruning.methods",
    "Harp": "harp.pruning.methods",
    "HarpError": "harp.errors",
    "HarpRates": "harp.pruning.methods",
    "HarpScores": "harp.pruning.methods",
    "Hydra": "harp.pruning.methods",
    "Keeper": "harp.training.checkpointing",
    "Lamp": "harp.pruning.methods",
    "Latent": "harp.pruning.methods",
    "LoadedRun": "harp.experiments.run_folder",
    "Locality": "harp.pruning.papers",
    "Mad": "harp.pruning.methods",
    "Magnitude": "harp.pruning.methods",
    "Mart": "harp.training.objectives",
    "Natural": "harp.training.objectives",
    "Normalized": "harp.models",
    "Objective": "harp.training.base",
    "Paper": "harp.pruning.papers",
    "Pgd": "harp.attacks",
    "PgdTraining": "harp.training.objectives",
    "Plan": "harp.pruning.methods",
    "Pruner": "harp.pruning.methods",
    "Random": "harp.pruning.methods",
    "Recipe": "harp.experiments.recipe",
    "Run": "harp.experiments.run",
    "Score": "harp.evaluation.score",
    "Square": "harp.attacks",
    "Tandem": "harp.pruning.methods",
    "Taxonomy": "harp.pruning.papers",
    "Trades": "harp.training.objectives",
    "TwinRep": "harp.pruning.methods",
    "Units": "harp.pruning.units",
    "Weights": "harp.pruning.units",
    "accuracy": "harp.evaluation.score",
    "apply_masks": "harp.pruning.masks",
    "build_model": "harp.models",
    "export": "harp.deploy.export.api",
    "fit": "harp.training.loop",
    "hold_masks": "harp.pruning.holding",
    "holdout": "harp.data.registry",
    "launch": "harp.system.distributed.fabric",
    "lift_masks": "harp.pruning.holding",
    "load": "harp.engine.load",
    "load_data": "harp.data.registry",
    "load_masks": "harp.pruning.masks",
    "load_recipe": "harp.experiments.compose",
    "load_run": "harp.experiments.run_folder",
    "load_study": "harp.experiments.study",
    "load_weights": "harp.models.weights",
    "peers": "harp.system.distributed.peers",
    "plot": "harp.reports.pictures",
    "push": "harp.deploy.sharing",
    "save_masks": "harp.pruning.masks",
    "save_model": "harp.models.weights",
    "schedules": "harp.pruning.schedules",
    "zoo": "harp.models.zoo",
}
_INNER = {
    "apply_masks": "apply",
    "build_model": "build",
    "hold_masks": "hold",
    "lift_masks": "lift",
    "load_data": "load",
    "load_masks": "load",
    "load_recipe": "load",
    "load_study": "load",
    "peers": "of_this_run",
    "save_masks": "save",
    "schedules": "",  # the module itself
    "zoo": "",
}

if not TYPE_CHECKING:  # a checker would take every misspelt name for something of any type
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> object:
        if name == "artefact":  # published model cards say `from harp import artefact`
            return import_module("harp.experiments.artefact")
        if name not in _HOMES:
            raise AttributeError(f"module 'harp' has no attribute {name!r}")
        module, inner = import_module(_HOMES[name]), _INNER.get(name, name)
        return getattr(module, inner) if inner else module


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
