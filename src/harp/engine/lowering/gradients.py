"""The gradients of a stage's values in the backward pass.

A value's gradient is a sum over the operations that read the value. Each of them adds the sum so far in the same step,
and the last one also applies the mask of the activation.
"""

from collections import Counter, defaultdict

from harp.engine.lowering.lower import Activation, Product, Stage, Value, read
from harp.engine.lowering.memory import Region
from harp.engine.lowering.steps import Steps
from harp.engine.native import bindings


class Gradients:
    """The partial gradients of every value so far; adds the steps that sum them."""

    def __init__(self, stage: Stage, steps: Steps) -> None:
        self.steps = steps
        self._parts: dict[Value, list[Region]] = defaultdict(list)
        self._masked: set[Value] = set()
        self._left = Counter(value for operation in stage.operations for value in read(operation))
        self._left.update(stage.outputs.values())

    def give(self, value: Value, region: Region) -> None:
        """Add a partial gradient that has its own region."""
        self._left[value] -= 1
        self._parts[value].append(region)

    def share(self, value: Value, region: Region) -> None:
        """Add a partial gradient whose region another value uses too."""
        region.whole.needed += 1
        self.give(value, region)

    def add_product(self, product: Product, gradient: Region) -> None:
        """Add a product's gradient: transposed taps, the sum so far, and the mask if this is the last part."""
        arena, value = self.steps.arena, product.x
        self._left[value] -= 1
        parts = self._parts[value]
        summand = parts.pop() if parts else None
        target = arena.region(value, 1)
        last = self._left[value] == 0 and not parts and value.activation.kind != bindings.LINEAR
        mask = bindings.APPLY_MASK if last else bindings.NO_MASK
        if last:
            self._masked.add(value)
        activation = value.activation if last else Activation()
        self.steps.multiply(product, gradient, target, summand, activation, mask, back=True)
        if summand is not None:
            arena.release(summand)
        parts.append(target)

    def take(self, value: Value) -> Region | None:
        """The complete gradient of a value, None if it has none."""
        arena, parts = self.steps.arena, self._parts.pop(value, [])
        if not parts:
            return None
        while len(parts) > 1 or (value.activation.kind != bindings.LINEAR and value not in self._masked):
            first, second = parts.pop(), parts.pop() if parts else None
            target = arena.region(value, 1)
            last = not parts
            self.steps.copy(self.steps.live.needed[value], first, target, second, value if last else None)
            for region in (first, second):
                if region is not None:
                    arena.release(region)
            if last:
                self._masked.add(value)
            parts.append(target)
        return parts[0]
