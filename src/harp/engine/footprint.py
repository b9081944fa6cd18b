"""Estimates the memory and the multiplications of a network before anything is allocated.

A file of a few bytes can describe windows and images of any size. The estimate counts what the engine allocates for one
group of images and one thread. It leaves small things out, so it is approximate.
"""

import math
from collections.abc import Mapping

from harp.engine.format.reader import BadFile
from harp.engine.graph.nodes import Graph
from harp.engine.lowering.lower import MaxPool, Operation, Product, Split, average_window, is_native
from harp.engine.lowering.memory import Arena
from harp.engine.network import Network
from harp.engine.runner import Runner

_TAP = 64  # bytes of a tap, including its weight and offset in the matrices
_STEP = 2048  # about the bytes of a step with its arrays
_RESULT = 8  # bytes of a number that torch computes: most have four, 64-bit integers have eight
_FLAGS = 4  # bytes of flags for each channel of a value
_MOST_PLACES = 1 << 62  # keys of taps are 64-bit integers
_FARTHEST = 2**31 - 1  # the native code's offsets, in floats, are 32-bit integers
MOST_WORK = 1 << 40  # multiplications for an image: some minutes


def check_taps(graph: Graph, entries: Mapping[str, int], limit: int) -> None:
    """Refuse a graph whose taps take more memory than the limit; `entries` is how many values each tensor stores."""
    shapes = {node.name: node.shape for node in graph.nodes}
    taps = 0
    for node in graph.nodes:
        if not is_native(node, shapes) or node.op in ("input", "maxpool", "flatten", "concat"):
            continue
        if node.op in ("conv", "linear"):
            taps += entries[node.tensors["weight"]]
        elif node.op in ("mean", "avgpool"):
            taps += node.shape[0] * math.prod(map(len, average_window(node, shapes[node.inputs[0]])))
        else:
            taps += node.shape[0]
    _demand(_TAP * taps, limit)


def check(network: Network, limit: int) -> None:
    """Refuse a network whose computation takes more memory than the limit, or too long."""
    shapes = {node.name: node.shape for node in network.graph.nodes}
    sizes = {network.graph.nodes[0].name: 4 * math.prod(network.graph.input_shape)}
    held = between = sum(sizes.values())
    lasting = work = 0
    for part, done in zip(network.parts, network.done, strict=True):
        if isinstance(part, Runner):
            lasting += max(program_bytes(part, lanes) for lanes in {1, part.lanes})
            work += sum(map(_work, part.stage.operations))
            results = {name: 4 * math.prod(value.size) for name, value in part.stage.outputs.items()}
        else:
            results = {part.name: _RESULT * math.prod(map(abs, shapes[part.name]))}
            if part.op in ("conv", "linear"):
                work += math.prod(network.tensors[part.tensors["weight"]].shape) * math.prod(part.shape[1:])
        sizes |= results
        held += sum(results.values())
        between = max(between, held)
        held -= sum(sizes[name] for name in done)
    _demand(lasting + between, limit)
    if work > MOST_WORK:
        raise BadFile(f"computing an image takes {work} multiplications, more than {MOST_WORK}")


def program_bytes(runner: Runner, lanes: int) -> int:
    """Bytes of a stage for groups of `lanes` images, including what building its programs takes."""
    arena, operations = Arena(runner.stage, lanes, runner.kernels), runner.stage.operations
    for value, plane in arena.planes.items():
        if value.size[0] * plane.size > _FARTHEST:
            raise BadFile(f"a result of shape {value.size} is too large for the native code with the zeros around it")
    for operation in operations:
        if isinstance(operation, Product) and _places(operation) > _MOST_PLACES:
            raise BadFile(
                f"a layer that gives {operation.y.size} is too large for the native code: weights lie too far apart"
            )
    for _ in arena.operations(arena.input_regions()):
        pass  # the arena only counts
    steps = len(operations) + sum(math.prod(split.stride or ()) for split in operations if isinstance(split, Split))
    runs = sum(arena.planes[operation.y].size // 4 for operation in operations)
    flags = _FLAGS * sum(value.size[0] for value in arena.planes)
    return 4 * arena.size + _STEP * steps + runs + flags


def _places(product: Product) -> int:
    """The number of possible keys of the taps, see `harp.engine.lowering.matrices`."""
    (low, high), (left, right) = product.taps.reach()
    return product.taps.rows * product.taps.planes * (high - low + 1) * (right - left + 1)


def _work(operation: Operation) -> int:
    pixels = math.prod(operation.y.size[1:])
    if isinstance(operation, Product):
        return len(operation.taps.row) * pixels
    return operation.y.size[0] * pixels * (math.prod(operation.kernel) if isinstance(operation, MaxPool) else 1)


def _demand(need: int, limit: int) -> None:
    if need > limit:
        raise BadFile(f"computing an image may take {need} bytes, more than the limit of {limit}")
