"""Which channels are computed: those that are read, and, in the backward pass, those that depend on the image.

A pruned network has channels that no kept weight reads, and channels that are constant since all their weights are
pruned. The first need not be computed, and the second need no gradient.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.lower import Concat, Operation, Product, Split, Stage, Value, read
from harp.engine.lowering.taps import Ints

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Liveness:
    """For every value, a flag for each channel: whether it is `read`, and whether its gradient is `needed`."""

    read: dict[Value, Flags]
    needed: dict[Value, Flags]


def liveness(stage: Stage) -> Liveness:
    """The channels of a stage that are read, and those whose gradient is needed."""
    inputs, outputs, operations = {*stage.inputs.values()}, {*stage.outputs.values()}, stage.operations
    values = inputs | outputs | {value for operation in operations for value in (*read(operation), operation.y)}
    is_read = {value: np.full(value.size[0], value in outputs) for value in values}
    varies = {value: np.full(value.size[0], value in inputs) for value in values}
    for operation in reversed(operations):
        for value, source, target in _links(operation):
            is_read[value][source[is_read[operation.y][target]]] = True
    for operation in operations:
        for value, source, target in _links(operation):
            varies[operation.y][target[varies[value][source]]] = True
    needed = {value: is_read[value] & varies[value] | (value in inputs) for value in values}
    for operation in operations:  # the backward pass copies these gradients, so all of them must be computed
        links = _links(operation)
        for value, source, target in links[1:] if isinstance(operation, Product) else links:
            needed[operation.y][target[needed[value][source]]] = True
    return Liveness(is_read, needed)


def _links(operation: Operation) -> list[tuple[Value, Ints, Ints]]:
    """For every value that is read: pairs of one of its channels and a channel that is computed from it."""
    channels = np.arange(operation.y.size[0])
    if isinstance(operation, Concat):
        return [(value, np.arange(len(part)), np.array(part)) for value, part in operation.parts()]
    if isinstance(operation, Product):
        summands = [] if operation.summand is None else [(operation.summand, channels, channels)]
        return [(operation.x, operation.taps.plane, operation.taps.row), *summands]
    source = channels
    if isinstance(operation, Split):
        before = np.arange(operation.x.size[0])
        pixels = math.prod(operation.x.size[1:])
        source = np.repeat(before, pixels) if operation.stride is None else np.resize(before, len(channels))
    return [(operation.x, source, channels)]
