"""The methods: one paper a file, one line a method in this table."""

from harp.pruners.base import Dense, Fixed, Latent, Plan, Pruner
from harp.pruners.harp import Harp, HarpRates, HarpScores
from harp.pruners.hydra import Hydra
from harp.pruners.magnitude import Magnitude

PRUNERS: dict[str, type[Pruner]] = {
    "dense": Dense,
    "fixed": Fixed,
    "magnitude": Magnitude,
    "hydra": Hydra,
    "harp": Harp,
    "harp-s": HarpScores,
    "harp-r": HarpRates,
}

__all__ = [
    "PRUNERS",
    "Dense",
    "Fixed",
    "Harp",
    "HarpRates",
    "HarpScores",
    "Hydra",
    "Latent",
    "Magnitude",
    "Plan",
    "Pruner",
]
