"""Counting floating point operations as they are made, forwards, backwards and in attacks.

By torch's own formulas for products and convolutions. Its `FlopCounterMode` also follows the modules, which does not
work while an attack asks for the gradient of images.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Counter(TorchDispatchMode):
    """While it is open, `total` counts: two for a multiplication with its addition."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], arguments: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Make the operation, and count it."""
        made = function(*arguments, **(options or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.total += formula(*arguments, **(options or {}), out_val=made)
        return made


@contextmanager
def densely() -> Iterator[None]:
    """Compute without the sparse engine for a while: it can't be counted, and is not there on other hardware."""
    before = os.environ.get("HARP_ENGINE")
    os.environ["HARP_ENGINE"] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HARP_ENGINE"]
        else:
            os.environ["HARP_ENGINE"] = before
