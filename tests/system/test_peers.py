"""What processes tell each other in a store: that they live, that all are to stop, and how they ended."""

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
    """Why a process would have ended itself."""
    reasons: list[str] = []
    monkeypatch.delenv(SUPERVISOR, raising=False)
    monkeypatch.setattr(os, "_exit", lambda code: reasons.append(f"{code}: {capsys.readouterr().err.splitlines()[-1]}"))
    monkeypatch.setattr(peers, "BEAT", 0.01)
    return reasons


class Connection:
    """A process's connection to the store, which may be cut, or slow with what it is given next."""

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
    """The second process's."""
    return Connection(dist.HashStore())


@pytest.fixture
def pair(ended: list[str], connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two processes, here in one."""
    both = Peers(connection.store, 0, 2), Peers(connection, 1, 2)
    yield both
    monkeypatch.setattr(peers, "SAVING", 0.05)  # a process whose connection was cut would be waited for
    for each in reversed(both):
        each.leave()


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def beats(process: Peers, count: int) -> None:
    """Wait for so many notes of a process."""
    before = process.beat
    until(lambda: process.beat > before + count)


def test_one_that_fails_ends_the_others(pair: Pair, ended: list[str]) -> None:
    """Its exception may have been caught and told: nobody would find out by an exchange of NCCL for half an hour."""
    pair[1].leave(in_order=False)
    until(lambda: ended)
    assert ended[0].startswith(f"{LOST}: error: process 1 of 2 failed;")


def test_one_that_is_done_ends_nobody(pair: Pair, ended: list[str]) -> None:
    pair[1].leave()
    pair[1].leave(in_order=False)  # the first word counts
    beats(pair[0], 3 * peers.GRACE)
    assert not ended


def test_one_that_says_nothing_more_is_dead(
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


def test_the_first_goes_last(pair: Pair) -> None:
    """It keeps the notes: others who compute or save would lose them."""
    thread = leaving(pair[0])
    beats(pair[1], 5)
    assert thread.is_alive()
    pair[1].leave()  # does not wait for the first
    thread.join(60)
    assert not thread.is_alive()


def test_a_late_note_does_not_hide_that_a_process_has_left(pair: Pair, connection: Connection) -> None:
    connection.slow.set()
    assert connection.reached.wait(60), "the pulse never came"
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


def test_who_stops_waits_until_the_others_have_saved(pair: Pair, ended: list[str]) -> None:
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


def test_nobody_is_waited_for_for_ever(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SAVING", 0.05)
    pair[0].leave()


def test_who_waits_in_a_meeting_for_one_that_stopped_is_stopped_too(pair: Pair) -> None:
    """And not told that the other one was lost, whichever of both it learns first."""
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


def test_who_waits_in_a_meeting_for_one_that_ended_is_told(pair: Pair) -> None:
    pair[1].leave()
    with pytest.raises(Lost, match="process 1 of 2 ended before its work was done"):
        pair[0].meet()


@pytest.mark.parametrize(
    ("code", "in_order"),
    [(0, True), (None, True), (UNFINISHED, True), (130, True), (1, False), (2, False), (76, False)],
)
def test_the_command_tells_how_it_ends(monkeypatch: pytest.MonkeyPatch, code: int | None, in_order: bool) -> None:
    told: list[bool] = []

    class One(peers.Alone):
        def leave(self, in_order: bool = True) -> None:
            told.append(in_order)

    monkeypatch.setattr(peers, "several", lambda: True)
    monkeypatch.setattr(peers, "of_this_run", One)
    processes.announce_exit(code)
    assert told == [in_order]


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
def test_a_script_of_somebody_else_need_not_say_it(last: str, said: str) -> None:
    words = [sys.executable, "-c", SCRIPT, last]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{said}\n", done.stderr
