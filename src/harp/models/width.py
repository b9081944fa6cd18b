"""Numbers of channels from the width of a network."""

import math

from harp.errors import ModelError


def scaled(channels: int, width: float) -> int:
    """`channels` times `width`, rounded, and at least one."""
    if isinstance(width, bool) or not isinstance(width, (int, float)) or not 0 < width < math.inf:
        raise ModelError(f"width is {width!r}; it must be a number above 0")
    return max(1, round(channels * width))
