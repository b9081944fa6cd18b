"""Of several processes one speaks."""

import logging

import pytest

from harp.cli import voice
from harp.display import Quiet, Terminal
from harp.processes import peers
from tests.conftest import Harp


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    found = logging.getLogger("harp")
    monkeypatch.setattr(found, "disabled", False)
    return found


def test_the_first_shows_and_warns(logger: logging.Logger) -> None:
    assert isinstance(voice.display(first=True), Terminal) and not logger.disabled
    assert type(voice.display(first=False)) is Quiet and logger.disabled


def test_others_are_silent_in_an_evaluation(
    harp: Harp, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Second(peers.Alone):
        rank = 1

    monkeypatch.setattr(peers, "of_this_run", Second)
    assert harp("evaluate", "tinynet", "--data", "nowhere.npz")[0] == 2
    assert logger.disabled, "before anything is read that may be warned of"
