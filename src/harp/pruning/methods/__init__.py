"""The methods: one file a paper, one line a method in this table; other packages can add to it, see `table.py`."""

from harp.pruning.methods.admm import Admm
from harp.pruning.methods.anp import AnpVs
from harp.pruning.methods.base import (
    Dense,
    Dynamic,
    Fixed,
    Latent,
    Layout,
    Loss,
    ParameterGroup,
    Phase,
    Plan,
    Pruner,
    largest,
)
from harp.pruning.methods.bcs import BcsP
from harp.pruning.methods.dnr import Dnr
from harp.pruning.methods.flying_bird import FlyingBird, FlyingBirdPlus
from harp.pruning.methods.harp import Harp, HarpRates, HarpScores
from harp.pruning.methods.hydra import Hydra
from harp.pruning.methods.mad import Mad
from harp.pruning.methods.magnitude import Erk, GlobalMagnitude, Lamp, Magnitude
from harp.pruning.methods.random_masks import Random
from harp.pruning.methods.table import Methods
from harp.pruning.methods.takeover import Takeover, check_optimizer
from harp.pruning.methods.tandem import Tandem
from harp.pruning.methods.twinrep import TwinRep

PRUNERS = Methods(
    {
        "dense": Dense,
        "fixed": Fixed,
        "random": Random,
        "magnitude": Magnitude,
        "global": GlobalMagnitude,
        "erk": Erk,
        "lamp": Lamp,
        "hydra": Hydra,
        "harp": Harp,
        "harp-s": HarpScores,
        "harp-r": HarpRates,
        "tandem": Tandem,
        "r-admm": Admm,
        "dnr": Dnr,
        "anp-vs": AnpVs,
        "mad": Mad,
        "bcs-p": BcsP,
        "flying-bird": FlyingBird,
        "flying-bird+": FlyingBirdPlus,
        "twinrep": TwinRep,
    }
)

__all__ = [
    "PRUNERS",
    "Admm",
    "AnpVs",
    "BcsP",
    "Dense",
    "Dnr",
    "Dynamic",
    "Erk",
    "Fixed",
    "FlyingBird",
    "FlyingBirdPlus",
    "GlobalMagnitude",
    "Harp",
    "HarpRates",
    "HarpScores",
    "Hydra",
    "Lamp",
    "Latent",
    "Layout",
    "Loss",
    "Mad",
    "Magnitude",
    "ParameterGroup",
    "Phase",
    "Plan",
    "Pruner",
    "Random",
    "Takeover",
    "Tandem",
    "TwinRep",
    "check_optimizer",
    "largest",
]
