"""Of several processes one speaks."""

import logging

import pytest

from harp.cli import ranks
from harp.errors import AT_CHANCE, LOST, UNFINISHED
from harp.system.distributed import peers
from harp.system.progress import Quiet, Terminal
from support.commands import Harp


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    found = logging.getLogger("harp")
    monkeypatch.setattr(found, "disabled", False)
    return found


def test_the_first_shows_and_warns(logger: logging.Logger) -> None:
    assert isinstance(ranks.display(first=True), Terminal) and not logger.disabled
    assert type(ranks.display(first=False)) is Quiet and logger.disabled


@pytest.mark.parametrize(
    ("code", "in_order"), [(None, True), (0, True), (AT_CHANCE, True), (UNFINISHED, True), (2, False), (LOST, False)]
)
def test_the_others_are_told_whether_an_end_is_in_order(
    monkeypatch: pytest.MonkeyPatch, code: int | None, in_order: bool
) -> None:
    told: list[bool] = []

    class First(peers.Alone):
        def leave(self, in_order: bool = True) -> None:
            told.append(in_order)

    monkeypatch.setattr(peers, "several", lambda: True)
    monkeypatch.setattr(peers, "of_this_run", First)
    ranks.leave(code)
    assert told == [in_order]


def test_others_are_silent_in_an_evaluation(
    harp: Harp, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Second(peers.Alone):
        rank = 1

    monkeypatch.setattr(peers, "of_this_run", Second)
    assert harp("evaluate", "tinynet", "--data", "nowhere.npz")[0] == 2
    assert logger.disabled, "before anything is read that may be warned of"
