"""What a refused file says and leaves behind."""

import os
from pathlib import Path

import pytest

from harp.errors import CheckpointError


def refused(call, *arguments) -> str:
    """The message of the CheckpointError that the call must raise, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def only(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
