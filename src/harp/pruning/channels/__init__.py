"""Structured pruning: channels found in any model, priced, masked and cut out."""

from harp.pruning.channels.cutting import Cut
from harp.pruning.channels.latency import Latency
from harp.pruning.channels.prices import TARIFFS, price
from harp.pruning.channels.removal import Removed, remove_dead
from harp.pruning.channels.units import Channels

__all__ = [
    "TARIFFS",
    "Channels",
    "Cut",
    "Latency",
    "Removed",
    "attention",
    "compact",
    "price",
    "rebuild",
    "removal",
    "remove_dead",
    "verify",
]
