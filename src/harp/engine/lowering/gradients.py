"""The gradients of a stage's values on the way back.

A value's gradient is the sum over those who read the value. Each adds the sum so far in the same pass, and the last one
also applies the mask of the activation.
"""

from collections import Counter, defaultdict

from harp.sparse import native
from harp.sparse.arena import Region
from harp.sparse.lowering import Activation, Product, Stage, Value, read
from harp.sparse.steps import Steps


class Gradients:
    """What has come together so far, value by value; what is left to do is added to the steps."""

    def __init__(self, stage: Stage, steps: Steps) -> None:
        self.steps = steps
        self._parts: dict[Value, list[Region]] = defaultdict(list)
        self._masked: set[Value] = set()
        self._left = Counter(value for operation in stage.operations for value in read(operation))
        self._left.update(stage.outputs.values())

    def give(self, value: Value, region: Region) -> None:
        """A gradient in a place of its own."""
        self._left[value] -= 1
        self._parts[value].append(region)

    def share(self, value: Value, region: Region) -> None:
        """A gradient that is another's as well."""
        region.whole.needed += 1
        self.give(value, region)

    def add_product(self, product: Product, given: Region) -> None:
        """Transposed taps, with what is there already added, and the mask if nothing is to come."""
        arena, value = self.steps.arena, product.x
        self._left[value] -= 1
        parts = self._parts[value]
        summand = parts.pop() if parts else None
        target = arena.region(value, 1)
        last = self._left[value] == 0 and not parts and value.activation.kind != native.LINEAR
        mask = native.APPLY_MASK if last else native.NO_MASK
        if last:
            self._masked.add(value)
        activation = value.activation if last else Activation()
        self.steps.multiply(product, given, target, summand, activation, mask, back=True)
        if summand is not None:
            arena.release(summand)
        parts.append(target)

    def take(self, value: Value) -> Region | None:
        """The whole gradient, None if nobody needs the value."""
        arena, parts = self.steps.arena, self._parts.pop(value, [])
        if not parts:
            return None
        while len(parts) > 1 or (value.activation.kind != native.LINEAR and value not in self._masked):
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
