"""Which channels are computed: those that are read, and, in the backward pass, those that depend on the image.

A pruned layer has channels that no later layer reads, and channels that are constant because all their weights are
pruned. The first need not be computed, and the second need no gradient.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.lower import Concat, Flatten, Operation, Product, Split, Stage, Value

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Liveness:
    """For every value, a flag for each channel: whether it is `read`, and whether its gradient is `needed`."""

    read: dict[Value, Flags]
    needed: dict[Value, Flags]


def liveness(stage: Stage) -> Liveness:
    """The channels of a stage that are read, and those whose gradient is needed."""
    values = {value for operation in stage.operations for value in (*_sources(operation), operation.y)}
    values |= {*stage.inputs.values(), *stage.outputs.values()}
    read = {value: np.zeros(value.size[0], np.bool_) for value in values}
    varies = {value: np.zeros(value.size[0], np.bool_) for value in values}
    for value in stage.outputs.values():
        read[value][:] = True
    for operation in reversed(stage.operations):
        _spread(operation, read[operation.y], read)
    for value in stage.inputs.values():
        varies[value][:] = True
    for operation in stage.operations:
        varies[operation.y] |= _gathered(operation, varies)
    needed = {value: read[value] & varies[value] for value in values}
    for value in stage.inputs.values():
        needed[value][:] = True
    for operation in stage.operations:  # the backward pass copies these gradients, so all of them must be computed
        if isinstance(operation, Product):
            if operation.summand is not None:
                needed[operation.y] |= needed[operation.summand]
        else:
            needed[operation.y] |= _gathered(operation, needed)
    return Liveness(read, needed)


def _sources(operation: Operation) -> list[Value]:
    if isinstance(operation, Concat):
        return operation.xs
    if isinstance(operation, Product) and operation.summand is not None:
        return [operation.x, operation.summand]
    return [operation.x]


def _spread(operation: Operation, flags: Flags, to: dict[Value, Flags]) -> None:
    """Propagate flags from an operation's output to its inputs."""
    if isinstance(operation, Product):
        to[operation.x][operation.taps.plane[flags[operation.taps.row]]] = True
        if operation.summand is not None:
            to[operation.summand][:] |= flags
    elif isinstance(operation, Split):
        to[operation.x][:] |= flags.reshape(math.prod(operation.stride), -1).any(0)
    elif isinstance(operation, Flatten):
        to[operation.x][:] |= flags.reshape(operation.x.size[0], -1).any(1)
    elif isinstance(operation, Concat):
        first = 0
        for value in operation.xs:
            to[value][:] |= flags[first : first + value.size[0]]
            first += value.size[0]
    else:
        to[operation.x][:] |= flags


def _gathered(operation: Operation, of: dict[Value, Flags]) -> Flags:
    """The flags of an operation's output from those of its inputs."""
    if isinstance(operation, Product):
        flags = np.zeros(operation.y.size[0], np.bool_)
        flags[operation.taps.row[of[operation.x][operation.taps.plane]]] = True
        return flags if operation.summand is None else flags | of[operation.summand]
    if isinstance(operation, Split):
        return np.tile(of[operation.x], math.prod(operation.stride))
    if isinstance(operation, Flatten):
        return np.repeat(of[operation.x], math.prod(operation.x.size[1:]))
    if isinstance(operation, Concat):
        return np.concatenate([of[value] for value in operation.xs])
    return of[operation.x]
