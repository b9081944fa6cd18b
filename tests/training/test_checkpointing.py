"""When a training is saved, when it is stopped, and what becomes of it while the disk takes nothing."""

import errno
import json
import math
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harp.errors import TIME_IS_UP, UNFINISHED, DiskError, Interrupted, RecipeError
from harp.models.weights import CheckpointError
from harp.pruning.methods import Harp
from harp.pruning.units import Weights
from harp.system import interrupt, states
from harp.system.interrupt import Stop
from harp.system.tensors import load_state
from harp.training import checkpointing
from harp.training.checkpointing import Keeper
from harp.training.loop import fit
from harp.training.objectives import Natural
from support.paths import TESTS


def state(epoch: int = 0, step: int = 1) -> dict[str, Any]:
    return {"epoch": epoch, "step": step, "x": torch.zeros(50_000)}


# ---------------------------------------------------------------- signals


HEARD = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]


@pytest.mark.parametrize("number", HEARD)
def test_a_stop_signal_saves_the_state_and_ends_the_training(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = Stop()
    with stop.on_signals():
        assert not Keeper(tmp_path / "state.pt", stop).due()
        signal.raise_signal(number)
        keeper = Keeper(tmp_path / "state.pt", stop)
        assert keeper.due()
        with pytest.raises(Interrupted, match="stopped in epoch 1, step 1; the state is saved") as caught:
            keeper.save(state())
    assert caught.value.code == (130 if number == signal.SIGINT else UNFINISHED)
    assert caught.value.cause == ("Ctrl-C" if number == signal.SIGINT else number.name)
    assert signal.getsignal(number) == before
    assert load_state(tmp_path / "state.pt")["step"] == 1


def test_other_signals_keep_their_handlers() -> None:
    left = [signal.SIGCONT, signal.SIGTSTP, signal.SIGCHLD, signal.SIGPIPE]
    before = [signal.getsignal(number) for number in left]
    with Stop().on_signals():
        assert [signal.getsignal(number) for number in left] == before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.on_signals():
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_repeated_preemption_signals_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler signals the job's steps, and the job's script passes its own on; then comes SIGTERM."""
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    stop = Stop()
    with stop.on_signals():
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.signal == signal.SIGUSR1
        assert not ended


def test_only_a_second_ctrl_c_ends_the_process_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    stop = Stop()
    with stop.on_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same one, which came two ways
        assert not ended
        stop._last_signal -= 1
        signal.raise_signal(signal.SIGINT)
        assert ended == [signal.SIGINT]


HANGUP = """
import os, signal, sys, time
from harp.system.interrupt import Stop
stop = Stop()
with stop.on_signals():
    open(sys.argv[1], "w").close()
    while stop.signal is None:
        time.sleep(0.01)
    print("to nobody", flush=True)
    open(sys.argv[1] + ".saved", "w").write(str(int(stop.signal)))
"""


def test_printing_after_the_terminal_has_closed_does_not_fail(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", HANGUP, str(tmp_path / "ready")])
    end = time.monotonic() + 240
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert (tmp_path / "ready.saved").read_text() == str(int(signal.SIGHUP))
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_process_leaves_stop_signals_to_its_parent() -> None:
    stop = Stop()
    with stop.on_signals():
        child = os.fork()
        if child == 0:
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                signal.raise_signal(number)
            if stop.signal is not None:
                os._exit(1)
            signal.raise_signal(signal.SIGTERM)
            os._exit(2)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM


# ---------------------------------------------------------------- time


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    for module in (interrupt, checkpointing):
        monkeypatch.setattr(module, "time", clock)
    yield clock


def test_states_are_saved_every_few_minutes(tmp_path: Path, clock: Clock) -> None:
    keeper = Keeper(tmp_path / "state.pt", Stop(), minutes=10)
    for _ in range(10):
        clock.now += 59
        assert not keeper.due()
    clock.now += 59
    assert keeper.due()
    keeper.save(state())
    assert not keeper.due()


@pytest.mark.parametrize(("step", "save", "limit"), [(0.1, 0.5, 60), (20, 30, 60), (1, 1, 600), (0.01, 0.01, 0.5)])
def test_the_training_ends_shortly_before_its_time_limit(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: float, save: float, limit: float
) -> None:
    """It ends before the time is over, whatever a step and a save take, and not much sooner."""
    monkeypatch.setattr(states.States, "save", lambda self, content: clock.sleep(save))
    stop = Stop(limit, began=clock.now - 1)
    keeper = Keeper(tmp_path / "state.pt", stop, minutes=10)
    end = clock.now - 1 + 60 * limit
    with pytest.raises(Interrupted) as caught:
        while True:
            clock.now += step
            if keeper.due():
                keeper.save(state())
    assert caught.value.signal == TIME_IS_UP
    assert caught.value.code == UNFINISHED
    assert caught.value.cause == "its time is over"
    assert clock.now < end
    assert clock.now > end - min(30, 0.1 * 60 * limit) - 4 * (step + save)


def test_a_validation_that_would_exceed_the_time_limit_is_not_started(tmp_path: Path, clock: Clock) -> None:
    stop = Stop(60)
    end = clock.now + 3600
    keeper = Keeper(tmp_path / "state.pt", stop, minutes=10)
    epochs = 0
    with pytest.raises(Interrupted):
        while True:
            for step in range(10):
                clock.now += 10
                if keeper.due(step == 9):
                    keeper.save(state(epochs, step + 1))
            clock.now += 300  # validation
            epochs += 1
            keeper.save(state(epochs, 0))
    assert clock.now < end
    kept = load_state(tmp_path / "state.pt")
    assert (kept["epoch"], kept["step"]) == (8, 10)  # all that there was time for


def test_the_state_is_saved_before_a_long_validation(tmp_path: Path, clock: Clock) -> None:
    keeper = Keeper(tmp_path / "state.pt", Stop(), minutes=1000)
    clock.now += 60
    assert keeper.due(last=True)  # its length is not known yet
    for validation, expected in ((1.0, False), (100.0, True)):
        clock.now += validation
        keeper.save(state(1, 0))
        clock.now += 60
        assert not keeper.due()
        assert keeper.due(last=True) is expected


def test_at_least_one_step_is_done_before_the_time_limit(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "state.pt", Stop(1e-6))
    assert keeper.load() is None  # nothing stops before it is asked
    assert keeper.due()
    with pytest.raises(RecipeError, match="0 minutes: give more than 0"):
        Stop(0)
    assert Stop().left() == math.inf


# ---------------------------------------------------------------- a disk that takes nothing


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "harp", folder], capture_output=True).returncode
    ):
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_training_goes_on_while_the_disk_is_full(
    small_disk: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    keeper = Keeper(small_disk / "state.pt", Stop(), minutes=10)
    keeper.save(state(0, 1))
    (small_disk / "other").write_bytes(bytes(700_000))
    keeper.save(state(0, 2))
    assert load_state(small_disk / "state.pt")["step"] == 1
    assert sorted(path.name for path in small_disk.iterdir()) == ["other", "state.pt"]
    (line,) = caplog.messages
    assert "state.pt: No space left on device (200.6 kB needed, " in line
    assert "kB free); training goes on, trying again in 60 s at the soonest. Last state: " in line
    assert "(epoch 1, step 1)" in line
    assert not keeper.due()
    clock.now += 61
    assert keeper.due()  # sooner than usual
    (small_disk / "other").unlink()
    keeper.save(state(0, 3))
    assert keeper.load()["step"] == 3  # type: ignore[index]


def test_training_goes_on_while_the_disk_is_read_only(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper(small_disk / "state.pt", Stop())
    keeper.save(state(0, 1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    keeper.save(state(0, 2))
    assert "Read-only file system; training goes on" in caplog.text
    assert keeper.load()["step"] == 1  # type: ignore[index]


def test_a_stop_without_a_saved_state_is_an_error(small_disk: Path, clock: Clock) -> None:
    stop = Stop()
    keeper = Keeper(small_disk / "state.pt", stop)
    keeper.save(state(0, 1))
    (small_disk / "other").write_bytes(bytes(700_000))
    stop.signal = signal.SIGTERM
    with pytest.raises(
        DiskError, match=r"^stopped in epoch 2, step 3, but the state is NOT saved: can't write .* No space"
    ) as caught:
        keeper.save(state(1, 3))
    assert str(caught.value).endswith(f"the last one on disk: {small_disk / 'state.pt'} (epoch 1, step 1)")


def test_the_last_save_is_retried_until_there_is_room(
    small_disk: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop()
    keeper = Keeper(small_disk / "state.pt", stop)
    (small_disk / "other").write_bytes(bytes(900_000))
    stop.signal = signal.SIGTERM

    def sleep(seconds: float) -> None:
        clock.now += seconds
        (small_disk / "other").unlink()

    monkeypatch.setattr(clock, "sleep", sleep)
    with pytest.raises(Interrupted):
        keeper.save(state(1, 3))
    assert load_state(small_disk / "state.pt")["step"] == 3


def test_writing_results_is_retried_while_the_disk_is_full(clock: Clock) -> None:
    tries: list[float] = []

    def write(full: bool = True) -> None:
        tries.append(clock.now)
        if len(tries) < 8:
            raise DiskError("no", full=full)

    interrupt.insist(write)
    assert len(tries) == 8
    assert clock.now - tries[0] > 60
    tries.clear()
    with pytest.raises(DiskError):
        interrupt.insist(write, patience=20)
    assert len(tries) == 5
    stop = Stop()
    stop.signal = 15
    tries.clear()
    with pytest.raises(DiskError):
        interrupt.insist(write, stop=stop)
    assert len(tries) == 1
    tries.clear()
    with pytest.raises(DiskError):  # a disk that can't be written to will not come to it by waiting
        interrupt.insist(lambda: write(full=False))
    assert len(tries) == 1


def test_a_state_that_can_not_be_saved_is_no_disk_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a function"):
        Keeper(tmp_path / "state.pt", Stop()).save({**state(), "x": lambda: 0})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE])
def test_a_failed_rename_keeps_the_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(tmp_path / "state.pt", Stop())
    keeper.save(state(0, 1))

    def refuse(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        keeper.save(state(0, 2))
    assert os.strerror(number) in caplog.text
    assert keeper.load()["step"] == 1  # type: ignore[index]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


# ---------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes saw."""
    folder = tmp_path_factory.mktemp("pair")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "support.keeper_job", str(folder)]
    both = [subprocess.Popen([*words, str(rank), str(port)], cwd=TESTS, stderr=subprocess.PIPE) for rank in range(2)]
    errors = [process.communicate(timeout=280)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    return [json.loads((folder / f"results.{rank}").read_text()) for rank in range(2)]


def test_a_signal_that_reaches_one_process_stops_all(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["signal"] == pair[1]["signal"]
    kind, text, number = pair[0]["signal"]
    assert kind == "Interrupted" and number == signal.SIGUSR1
    assert "the state is saved" in text


def test_the_time_limit_of_one_process_stops_all(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["time"] == pair[1]["time"]
    assert pair[0]["time"][::2] == ["Interrupted", TIME_IS_UP]


def test_all_processes_raise_the_disk_error_of_one(pair: list[dict[str, Any]]) -> None:
    assert [results["disk"][0] for results in pair] == ["DiskError", "DiskError"]
    assert all("the state is NOT saved" in results["disk"][1] for results in pair)


def test_all_processes_resume_from_the_same_state(pair: list[dict[str, Any]]) -> None:
    assert [results["loaded"] for results in pair] == [1, 1]


def test_divergence_in_one_process_stops_all(pair: list[dict[str, Any]]) -> None:
    loss, gradient = zip(*(results["diverged"] for results in pair), strict=True)
    assert loss[0].startswith("the loss of another process became NaN in step 3")
    assert loss[1].startswith("the loss became nan in step 3")
    assert gradient[0] == gradient[1] and gradient[0].startswith("the gradient of w became NaN or infinite in step 5")


def test_processes_exchange_their_flags_about_once_a_second(pair: list[dict[str, Any]]) -> None:
    assert [results["asked"] for results in pair] in ([3, 3], [4, 4])  # in three seconds


def test_a_training_resumed_after_its_last_step_ends_with_the_same_masks(tmp_path: Path) -> None:
    """HARP keeps weights on paths through the network. It needs an image to find them, and no batch is left."""

    def masks() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 4)]
        model = nn.Sequential(*layers)
        generator = torch.Generator().manual_seed(1)
        batches = [(torch.rand(16, 1, 8, 8, generator=generator), torch.arange(16) % 4) for _ in range(4)]
        keeper = Keeper(tmp_path / "state.pt", Stop(), minutes=60)
        return fit(model, batches, Natural(), Harp(Weights(model), keep=0.03), epochs=3, lr=0.1, keeper=keeper).masks

    first, resumed = masks(), masks()
    assert (tmp_path / "state.pt").exists()
    assert all(torch.equal(first[name], resumed[name]) for name in first)
