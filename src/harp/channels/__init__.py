"""Structured pruning: channels found in any model, priced, masked and cut out."""

from harp.channels.cutting import Cut
from harp.channels.products import TARIFFS, price
from harp.channels.units import Channels

__all__ = ["TARIFFS", "Channels", "Cut", "price"]
