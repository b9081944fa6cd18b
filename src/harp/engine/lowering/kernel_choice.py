"""Chooses the fastest kernel for a product: nonzero weights one by one, in blocks, or all weights including zeros.

The times are in nanoseconds of one CPU with AVX2, for a group of images or for one. They were measured with layers of
16 to 512 channels and of 2x2 to 32x32 pixels, each with all kernels and at densities from 0.1 to 1. With AVX-512 the
same numbers choose well enough: in the sweeps of benchmarks/inference.py no density is slower than dense there either.
The estimates depend on counts alone, so the choice is the same every time.
"""

from harp.engine.lowering import narrow, winograd
from harp.engine.lowering.matrices import FULL_ENOUGH, fill
from harp.engine.lowering.narrow import Panels
from harp.engine.lowering.planes import Plane
from harp.engine.lowering.taps import Taps
from harp.engine.lowering.winograd import Transformed

Dense = Transformed | Panels

_TAP = 0.28, 0.36  # a vector times a weight with its own offset: several images, or one
_BLOCK = 0.18  # a vector times a weight of a block, a panel or a transformed matrix
_READ = (
    1.3,
    0.5,
)  # reading a weight with its own offset, or one of a block; with one image this overlaps with the products
_TILE = 40.0  # the transform of a vector of tiles, of the input or the output
_BYTE = 0.06  # a byte of weights from memory, read sequentially


def dense(taps: Taps, x: Plane, y: Plane) -> Dense | None:
    """The weights including zeros in the fastest dense form, None if skipping the zeros is faster."""
    if len(taps.row) == 0:
        return None
    direct = direct_time(taps, y)
    by_tiles = winograd_time(taps, y)
    by_pixels = narrow_time(taps, y)
    if min(by_tiles, by_pixels) >= direct:
        return None
    return winograd.transformed(taps) if by_tiles < by_pixels else narrow.panels(taps, x)


def direct_time(taps: Taps, y: Plane) -> float:
    """The time with the weights one by one, or in blocks if these are full enough."""
    vectors = int(y.runs(1)[:, 1].sum())
    single = y.lanes == 1
    share = fill(taps)
    if share >= FULL_ENOUGH:
        return len(taps.row) / share * max(vectors * _BLOCK, single * _READ[1])
    if single:
        return len(taps.row) * max(vectors * _TAP[1], _READ[0])
    return len(taps.row) * (vectors * _TAP[0] + _READ[0])


def winograd_time(taps: Taps, y: Plane) -> float:
    """The time with Winograd's tiles; infinite if they can't compute the layer."""
    if not winograd.suits(taps):
        return float("inf")
    planes, rows = taps.planes, winograd.padded(taps.rows)
    weights, tiles = 16 * planes * rows, winograd.tiles(y)
    read = 0.0 if y.lanes > 1 else 4 * weights * _BYTE  # several groups of images share the weights that are read
    return max(weights * tiles * _BLOCK, read) + (planes + taps.rows) * tiles * _TILE


def narrow_time(taps: Taps, y: Plane) -> float:
    """The time with vectors of output channels; infinite if they can't compute the layer."""
    pixels = y.height * y.width
    if y.lanes > 1 or pixels > narrow.MOST_PIXELS:
        return float("inf")
    (low, high), (left, right) = taps.reach()
    weights = taps.planes * (high - low + 1) * (right - left + 1) * narrow.padded(taps.rows, y.vector)
    return max(weights / y.vector * pixels * _BLOCK, 4 * weights * _BYTE)
