"""The sparse engine on or off for a while, so that what is called dense is dense."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "HARP_ENGINE"


@contextmanager
def engine(*, on: bool) -> Iterator[None]:
    """Let attacks and trainings use the engine where it fits (the default), or nowhere."""
    before = os.environ.pop(_VARIABLE, None)
    if not on:
        os.environ[_VARIABLE] = "off"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        if before is not None:
            os.environ[_VARIABLE] = before
