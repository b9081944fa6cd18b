"""One torch thread a worker: the suite runs several workers, and spinning threads starve each other."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from harp import cli
from harp.system import interrupt

pytest.register_assert_rewrite("support")

from support.commands import Harp  # noqa: E402 (only what is imported from here on is rewritten)

torch.set_num_threads(1)

# What a shell starts in the background is deaf to Ctrl-C, and so would be all commands that the tests start and stop.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What nohup starts ignores SIGHUP, and so would all commands that the tests hang up.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# New examples belong on a developer's machine: a check that gates everybody's work must give the same answer twice.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def harp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Harp]:
    """Run the command in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # the command puts its own in its place
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["harp", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    yield command
    for number, handler in before.items():
        signal.signal(number, handler)
