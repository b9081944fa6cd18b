"""The methods: one paper a file, one line a method in this table."""

from harp.pruners.admm import Admm
from harp.pruners.anp import AnpVs
from harp.pruners.base import Dense, Dynamic, Fixed, Latent, Layout, Phase, Plan, Pruner
from harp.pruners.bcs import BcsP
from harp.pruners.chance import Random
from harp.pruners.dnr import Dnr
from harp.pruners.flying_bird import FlyingBird, FlyingBirdPlus
from harp.pruners.harp import Harp, HarpRates, HarpScores
from harp.pruners.hydra import Hydra
from harp.pruners.mad import Mad
from harp.pruners.magnitude import Erk, GlobalMagnitude, Lamp, Magnitude
from harp.pruners.tandem import Tandem
from harp.pruners.twinrep import TwinRep

PRUNERS: dict[str, type[Pruner]] = {
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
    "Mad",
    "Magnitude",
    "Phase",
    "Plan",
    "Pruner",
    "Random",
    "Tandem",
    "TwinRep",
]
