"""Which way of computing a product is the fastest: its weights one by one, in blocks, or all of them, zero or not.

The times are in nanoseconds of one CPU with AVX2, for a group of images or for one. They were measured with layers of
16 to 512 channels and of 2x2 to 32x32 pixels, each by all ways and at densities from 0.1 to 1. With AVX-512 the same
numbers choose well enough: in the sweeps of benchmarks/inference.py no density is slower than dense there either.
They depend on counts alone, so that the choice is the same every time.
"""

from harp.sparse import narrow, winograd
from harp.sparse.matrices import FULL_ENOUGH, fill
from harp.sparse.narrow import Panels
from harp.sparse.planes import Plane
from harp.sparse.taps import Taps
from harp.sparse.winograd import Transformed

Dense = Transformed | Panels

_TAP = 0.28, 0.36  # a vector times a weight with its own place: several images, or one
_BLOCK = 0.18  # a vector times a weight of a block, a panel or a transformed matrix
_READ = 1.3, 0.5  # reading a weight with its own place, or one of a block; with one image it is done meanwhile
_TILE = 40.0  # the transform of a vector of tiles, in or out
_BYTE = 0.06  # a byte of weights from memory, read in a row


def dense(each: Taps, x: Plane, y: Plane) -> Dense | None:
    """The weights with their zeros in the form that is fastest, if it is faster than without zeros."""
    if len(each.row) == 0:
        return None
    least = direct_time(each, y)
    by_tiles = winograd_time(each, y)
    by_pixels = narrow_time(each, y)
    if min(by_tiles, by_pixels) >= least:
        return None
    return winograd.transformed(each) if by_tiles < by_pixels else narrow.panels(each, x)


def direct_time(each: Taps, y: Plane) -> float:
    """Of the weights one by one, or in blocks if they are better."""
    vectors = int(y.runs(1)[:, 1].sum())
    single = y.lanes == 1
    share = fill(each)
    if share >= FULL_ENOUGH:
        return len(each.row) / share * max(vectors * _BLOCK, single * _READ[1])
    if single:
        return len(each.row) * max(vectors * _TAP[1], _READ[0])
    return len(each.row) * (vectors * _TAP[0] + _READ[0])


def winograd_time(each: Taps, y: Plane) -> float:
    """Of Winograd's tiles; infinite if the layer is none for them."""
    if not winograd.suits(each):
        return float("inf")
    planes, rows = each.planes, winograd.padded(each.rows)
    weights, tiles = 16 * planes * rows, winograd.tiles(y)
    read = 0.0 if y.lanes > 1 else 4 * weights * _BYTE  # several groups of images share what is read
    return max(weights * tiles * _BLOCK, read) + (planes + each.rows) * tiles * _TILE


def narrow_time(each: Taps, y: Plane) -> float:
    """Of vectors of outputs; infinite if the layer is none for them."""
    pixels = y.height * y.width
    if y.lanes > 1 or pixels > narrow.MOST_PIXELS:
        return float("inf")
    (low, high), (left, right) = each.reach()
    weights = each.planes * (high - low + 1) * (right - left + 1) * narrow.padded(each.rows, y.vector)
    return max(weights / y.vector * pixels * _BLOCK, 4 * weights * _BYTE)
