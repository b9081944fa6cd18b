"""Breaking an attack off in the middle, and going on with another object from the file that was saved."""

from pathlib import Path

import pytest

from harp.attacks.batched import Packing
from harp.system.tensors import load_state, save_state


class Enough(Exception):
    """Stops an attack."""


def go_on(first: Packing, second: Packing, at: int, path: Path) -> None:
    """Run the first up to a tick, save its state, and let the second end the work from there."""

    def save() -> None:
        if first.ticks == at:
            save_state(path, first.state())
            raise Enough

    with pytest.raises(Enough):
        first.run(save)
    second.load(load_state(path))
    second.run()
