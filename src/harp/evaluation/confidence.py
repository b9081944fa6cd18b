"""95 % confidence intervals: Student's t for the mean of a few repetitions, Wilson's for a share of images."""

import math
import statistics
from collections.abc import Sequence

_Z = 1.959963984540054  # the standard normal distribution's 97.5 % point
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, by degrees of freedom from 1


def quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t, to three digits: a table, then its expansion in 1 / degrees of freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    terms = (
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
    )
    return _Z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval; the latter is NaN for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p of n images, which also holds near 0 and 1.

    (p + z²/2n ± z √(p (1 − p)/n + z²/4n²)) / (1 + z²/n)
    """
    middle = share + _Z**2 / (2 * n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    scale = 1 + _Z**2 / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
