"""The layout of every value of a stage."""

from collections import defaultdict

from harp.engine.lowering.lower import Concat, Product, Stage, Value, read
from harp.engine.lowering.planes import Plane


def layouts(stage: Stage, lanes: int, vector: int) -> dict[Value, Plane]:
    """The layout of every value. Values that a product or a concatenation links share one pitch and padding."""
    group: dict[Value, Value] = {}

    def root(value: Value) -> Value:
        while (above := group.setdefault(value, value)) is not value:
            group[value] = group[above]  # path compression: a long chain is not walked twice
            value = above
        return value

    pads: list[tuple[Value, int]] = []
    for operation in stage.operations:
        linked = read(operation) if isinstance(operation, (Product, Concat)) else []
        for value in (*read(operation), operation.y):
            root(value)
        for value in linked:
            group[root(value)] = root(operation.y)
        if isinstance(operation, Product):
            pads.append((operation.y, _reach(operation)))
    for value in (*stage.inputs.values(), *stage.outputs.values()):
        root(value)
    pad: dict[Value, int] = defaultdict(int)
    for value, reach in pads:
        pad[root(value)] = max(pad[root(value)], reach)
    width: dict[Value, int] = defaultdict(int)
    for value in group:
        width[root(value)] = max(width[root(value)], value.size[2])
    planes = {}
    for value in group:
        around = pad[root(value)]
        planes[value] = Plane(*value.size[1:], around, width[root(value)] + around, lanes, vector)
    return planes


def _reach(product: Product) -> int:
    """How far outside a plane a product reads, in the forward or the backward pass."""
    reach = 0
    sizes = zip(product.taps.reach(), product.x.size[1:], product.y.size[1:], strict=True)
    for (low, high), inputs, outputs in sizes:
        reach = max(reach, -low, outputs - 1 + high - (inputs - 1), high, inputs - 1 - low - (outputs - 1))
    return reach
