"""Structured pruning: channels found in any model, priced, masked and cut out."""

from harp.channels.cutting import Cut
from harp.channels.dead import Removed, remove_dead
from harp.channels.latency import Latency
from harp.channels.products import TARIFFS, price
from harp.channels.units import Channels

__all__ = ["TARIFFS", "Channels", "Cut", "Latency", "Removed", "price", "remove_dead"]
