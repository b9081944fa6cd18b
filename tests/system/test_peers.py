"""Status messages between processes: heartbeats, requests to stop, and how a process ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from harp.cli import processes
from harp.errors import LOST, UNFINISHED, Interrupted, Lost
from harp.system.distributed import peers
from harp.system.distributed.launcher import SUPERVISOR
from harp.system.distributed.peers import Peers
from harp.system.interrupt import Stop
from support.paths import ROOT

Pair = tuple[Peers, Peers]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The exit codes and messages with which a process would have exited."""
    reasons: list[str] = []
    monkeypatch.delenv(SUPERVISOR, raising=False)
    monkeypatch.setattr(os, "_exit", lambda code: reasons.append(f"{code}: {capsys.readouterr().err.splitlines()[-1]}"))
    monkeypatch.setattr(peers, "BEAT", 0.01)
    return reasons


class Connection:
    """A connection of a process to the store, which can be cut, or slow for the next message."""

    def __init__(self, store: dist.HashStore) -> None:
        self.store, self.cut, self.slow = store, False, threading.Event()
        self.reached, self.free, self.arrived = threading.Event(), threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        late = self.slow.is_set()
        if late:
            self.slow.clear()
            self.reached.set()
            self.free.wait(60)
        if not self.cut:
            self.store.set(key, value)
        if late:
            self.arrived.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.fixture
def connection() -> Connection:
    """The connection of the second process."""
    return Connection(dist.HashStore())


@pytest.fixture
def pair(ended: list[str], connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two processes, simulated in one."""
    both = Peers(connection.store, 0, 2), Peers(connection, 1, 2)
    yield both
    monkeypatch.setattr(peers, "SAVING", 0.05)  # do not wait for a process whose connection was cut
    for process in reversed(both):
        process.leave()


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def beats(process: Peers, count: int) -> None:
    """Wait for a number of heartbeats of a process."""
    before = process.beat
    until(lambda: process.beat > before + count)


def test_a_failed_process_ends_the_others(pair: Pair, ended: list[str]) -> None:
    """Its exception may have been caught: a collective operation of NCCL would only notice it after half an hour."""
    pair[1].leave(in_order=False)
    until(lambda: ended)
    assert ended[0].startswith(f"{LOST}: error: process 1 of 2 failed;")


def test_a_finished_process_does_not_end_the_others(pair: Pair, ended: list[str]) -> None:
    pair[1].leave()
    pair[1].leave(in_order=False)  # the first call counts
    beats(pair[0], 3 * peers.GRACE)
    assert not ended


def test_a_process_without_heartbeat_counts_as_dead(
    pair: Pair, ended: list[str], connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LATE", 5)
    connection.cut = True
    until(lambda: ended)
    assert ended[0].startswith(f"{LOST}: error: process 1 of 2 gave no sign of life")


def leaving(process: Peers) -> threading.Thread:
    thread = threading.Thread(target=process.leave)
    thread.start()
    return thread


def test_process_0_leaves_last(pair: Pair) -> None:
    """It hosts the store, which the others need while they compute or save."""
    thread = leaving(pair[0])
    beats(pair[1], 5)
    assert thread.is_alive()
    pair[1].leave()  # does not wait for the first
    thread.join(60)
    assert not thread.is_alive()


def test_a_late_heartbeat_does_not_overwrite_the_last_status(pair: Pair, connection: Connection) -> None:
    connection.slow.set()
    assert connection.reached.wait(60), "no heartbeat was sent"
    second = leaving(pair[1])
    second.join(0.2)
    connection.free.set()
    assert connection.arrived.wait(60)
    second.join(60)
    first = leaving(pair[0])
    first.join(20)
    assert not first.is_alive()


def test_a_process_that_leaves_waits_for_its_heartbeat_to_end(pair: Pair, connection: Connection) -> None:
    """Python aborts when a thread comes back from the store's C++ code while the interpreter shuts down."""
    inside, free = threading.Event(), threading.Event()

    def slow_multi_get(keys: list[str]) -> list[bytes]:
        inside.set()
        free.wait(60)
        return list(connection.store.multi_get(keys))

    connection.multi_get = slow_multi_get  # type: ignore[attr-defined]
    assert inside.wait(60), "no heartbeat was sent"
    second = leaving(pair[1])
    second.join(0.2)
    assert second.is_alive()
    free.set()
    second.join(60)
    assert not second.is_alive()


def test_a_stopping_process_waits_until_the_others_have_saved(pair: Pair, ended: list[str]) -> None:
    stops = [Stop(), Stop()]
    for process, stop in zip(pair, stops, strict=True):
        process.listen(stop)
    stops[1].signal = signal.SIGUSR1
    thread = leaving(pair[1])
    until(lambda: stops[0].signal == signal.SIGUSR1)
    beats(pair[0], 5)
    assert thread.is_alive() and not ended
    pair[0].leave()
    thread.join(60)
    assert not thread.is_alive()


def test_waiting_for_others_has_a_time_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SAVING", 0.05)
    pair[0].leave()


def test_a_process_at_a_barrier_stops_if_another_one_stopped(pair: Pair) -> None:
    """It does not report the other one as lost, whichever of both it learns first."""
    stops = [Stop(), Stop()]
    for process, stop in zip(pair, stops, strict=True):
        process.listen(stop)
    stops[1].signal = signal.SIGTERM
    thread = leaving(pair[1])

    def wait() -> None:
        if stops[0].signal is not None:
            raise Interrupted("stopped", stops[0].signal)

    with pytest.raises(Interrupted):
        pair[0].meet(wait)
    pair[0].leave()
    thread.join(60)


def test_a_process_at_a_barrier_gets_an_error_if_another_one_ended(pair: Pair) -> None:
    pair[1].leave()
    with pytest.raises(Lost, match="process 1 of 2 ended before its work was done"):
        pair[0].meet()


@pytest.mark.parametrize(
    ("code", "in_order"),
    [(0, True), (1, True), (None, True), (UNFINISHED, True), (130, True), (2, False), (76, False)],
)
def test_the_command_reports_how_it_ends_to_the_others(
    monkeypatch: pytest.MonkeyPatch, code: int | None, in_order: bool
) -> None:
    reports: list[bool] = []

    class One(peers.Alone):
        def leave(self, in_order: bool = True) -> None:
            reports.append(in_order)

    monkeypatch.setattr(peers, "several", lambda: True)
    monkeypatch.setattr(peers, "of_this_run", One)
    processes.announce_exit(code)
    assert reports == [in_order]


SCRIPT = """
import sys, torch.distributed as dist
from harp.system.distributed import peers
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
import os
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
peers.several = lambda: True
peers.Peers.leave = lambda self, in_order: print("in order" if in_order else "failed", flush=True)
peers.of_this_run()
eval(sys.argv[1])
"""


@pytest.mark.parametrize(("last", "said"), [("None", "in order"), ("1 / 0", "failed")])
def test_a_user_script_need_not_report_how_it_ends(last: str, said: str) -> None:
    words = [sys.executable, "-c", SCRIPT, last]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{said}\n", done.stderr
