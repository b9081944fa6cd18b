"""Of several processes one prints what they have in common."""

import logging

import pytest

from harp.cli import processes
from harp.errors import AT_CHANCE, LOST, PROBLEM, UNFINISHED
from harp.system.distributed import peers
from harp.system.progress import Quiet, Terminal
from support.commands import Harp


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    logger = logging.getLogger("harp")
    monkeypatch.setattr(logger, "disabled", False)
    return logger


def test_only_the_first_process_shows_progress_and_logs(logger: logging.Logger) -> None:
    assert isinstance(processes.display(first=True), Terminal) and not logger.disabled
    assert type(processes.display(first=False)) is Quiet and logger.disabled


@pytest.mark.parametrize(
    ("code", "in_order"),
    [(None, True), (0, True), (PROBLEM, True), (AT_CHANCE, True), (UNFINISHED, True), (2, False), (LOST, False)],
)
def test_other_processes_learn_whether_an_exit_is_regular(
    monkeypatch: pytest.MonkeyPatch, code: int | None, in_order: bool
) -> None:
    announced: list[bool] = []

    class First(peers.Alone):
        def leave(self, in_order: bool = True) -> None:
            announced.append(in_order)

    monkeypatch.setattr(peers, "several", lambda: True)
    monkeypatch.setattr(peers, "of_this_run", First)
    processes.announce_exit(code)
    assert announced == [in_order]


def test_other_processes_of_an_evaluation_log_nothing(
    harp: Harp, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Second(peers.Alone):
        rank = 1

    monkeypatch.setattr(peers, "of_this_run", Second)
    assert harp("evaluate", "tinynet", "--data", "nowhere.npz")[0] == 2
    assert logger.disabled, "before anything is read that may cause a warning"
