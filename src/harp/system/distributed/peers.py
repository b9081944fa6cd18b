"""Status messages between the processes of a run: heartbeats, requests to stop, progress and barriers.

Every process has a heartbeat thread. Every few seconds it writes a status to the store of the process group and reads
the status of the others. This detects a process or machine that died even while the main thread waits in a collective
operation, passes a request to stop from one process to all, and gives the first process the total progress. Processes
that work separately for hours, as in an evaluation, also use the store as a barrier, because it has no time limit. The
last status of a process says whether it ended normally; if it did not, the others end soon after it.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from harp.errors import LOST, Lost
from harp.system.distributed.launcher import SUPERVISOR
from harp.system.interrupt import Stop

BEAT = 2.0  # seconds between two heartbeats
LATE = 30  # heartbeats without a new status, after which a process counts as dead
# Heartbeats to wait after another process failed: the same error may be about to occur here, and the launcher first
# asks the remaining processes to save their state.
GRACE = 3
STORE_TIMEOUT = timedelta(seconds=60)  # the time limit of one access to the store
SAVING = 120.0  # the longest time in seconds that a stopping process waits for the others to save
_ORPHANED = 60.0  # seconds to save and exit after the launcher has died

T = TypeVar("T")


class Alone:
    """The only process of a run."""

    rank, world = 0, 1

    def listen(self, stop: Stop) -> None:
        """Share requests to stop: one made here reaches all processes, and theirs set `stop` here."""

    def tell(self, done: float) -> None:
        """Report the progress of this process to the others."""

    def done(self) -> float | None:
        """The total progress of all processes, from their latest reports; None if there is only this process."""
        return None

    def meet(self, wait: Callable[[], None] = lambda: None) -> None:
        """A barrier without a time limit; `wait` is called repeatedly while waiting, and may raise."""

    def speaks(self, text: str) -> bool:
        """Whether this process prints an error that the others may have too.

        An empty text stands for an error that is not printed if another process has printed any error.
        """
        return True

    def leave(self, in_order: bool = True) -> None:
        """Tell the others that this process ends, and whether it ends normally."""

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        return [value]

    def first(self, value: T) -> T:
        """The value of process 0."""
        return value


class Peers(Alone):
    """One of several processes, which exchange their status through a store."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.rank, self.world, self._store = rank, world, store
        self._stop: Stop | None = None
        self.beat, self._done, self._meetings = 0, 0.0, 0  # `beat`: the number of heartbeats sent
        self._left: bool | None = None  # None until this process leaves, then whether it left normally
        self._statuses: dict[int, dict[str, Any]] = {}
        self._over, self._sending = threading.Event(), threading.Lock()
        self._send_status()
        self._thread = threading.Thread(target=self._heartbeat, name="pulse", daemon=True)
        self._thread.start()

    def listen(self, stop: Stop) -> None:
        """Share requests to stop: one made here reaches all processes, and theirs set `stop` here."""
        self._stop = stop

    def tell(self, done: float) -> None:
        """Report the progress of this process to the others."""
        self._done = done

    def done(self) -> float | None:
        """The total progress of all processes, from their latest reports."""
        others = [status for rank, status in list(self._statuses.items()) if rank != self.rank]
        return self._done + sum(float(status["done"]) for status in others if status["work"] == self._meetings)

    def meet(self, wait: Callable[[], None] = lambda: None) -> None:
        """A barrier without a time limit; `wait` is called repeatedly while waiting, and may raise."""
        key = f"meeting/{self._meetings}"
        present, pause = self._store.add(key, 1), 0.01
        while present < self.world:
            left = [rank for rank, status in list(self._statuses.items()) if status["left"] is not None]
            wait()
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)
            present = self._store.add(key, 0)
            if left and present < self.world:
                raise Lost(f"process {left[0]} of {self.world} ended before its work was done")
        self._meetings, self._done = self._meetings + 1, 0.0

    def speaks(self, text: str) -> bool:
        """Whether this process prints an error: process 0 does, another one if process 0 has not within two seconds.

        If the store is gone, process 0 has ended and only an empty text, the report of a lost process, is printed.
        """
        try:
            if self.rank == 0:
                self._store.set("said", text)
                return True
            for _ in range(20):
                if self._store.check(["said"]):
                    return bool(text) and self._store.get("said").decode() != text
                time.sleep(0.1)
        except RuntimeError:
            return not text
        return True

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def first(self, value: T) -> T:
        """The value of process 0."""
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def leave(self, in_order: bool = True) -> None:
        """Tell the others that this process ends, and whether it ends normally.

        In a normal end process 0, which hosts the store, waits for all others. After a request to stop, every process
        waits for all others: a launcher may kill the remaining processes when the first one exits, and they may still
        be saving.
        """
        if self._left is not None:
            return
        self._left = in_order
        self._over.set()
        # Python aborts if a thread returns from the store's C++ code while the interpreter shuts down.
        self._thread.join(STORE_TIMEOUT.total_seconds())
        try:
            self._send_status()
            if in_order and (self.rank == 0 or (self._stop is not None and self._stop.signal is not None)):
                self._wait_for_others()
        except RuntimeError:  # process 0 has already ended, and the store with it
            return

    def _wait_for_others(self) -> None:
        """Wait until all others have left, for `SAVING` seconds at most."""
        end, pause = time.monotonic() + SAVING, 0.01
        while any(status["left"] is None for status in self._read_statuses().values()) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)

    def _send_status(self) -> None:
        with self._sending:  # a late heartbeat must not overwrite the last status
            stop = None if self._stop is None else self._stop.signal
            status = {"beat": self.beat, "left": self._left, "stop": stop, "work": self._meetings, "done": self._done}
            self._store.set(f"pulse/{self.rank}", json.dumps(status))

    def _read_statuses(self) -> dict[int, dict[str, Any]]:
        keys = [key for rank in range(self.world) if self._store.check([key := f"pulse/{rank}"])]
        texts = self._store.multi_get(keys)
        return {int(key[6:]): json.loads(text) for key, text in zip(keys, texts, strict=True)}

    def _heartbeat(self) -> None:
        missed = dict.fromkeys(range(self.world), 0)
        while not self._over.wait(BEAT):
            self.beat += 1
            try:
                self._send_status()
                statuses = self._read_statuses()
            except RuntimeError:
                # In a normal end process 0 may exit first: leave time to end here too.
                if not self._over.wait(2 * BEAT):
                    _exit_lost("the first process of the run can't be reached")
                return
            for rank, status in statuses.items():
                left = status["left"]
                missed[rank] = 0 if status != self._statuses.get(rank) or left else missed[rank] + 1
                if missed[rank] > (LATE if left is None else GRACE):
                    problem = f"gave no sign of life for {LATE * BEAT:.0f} seconds" if left is None else "failed"
                    _exit_lost(f"process {rank} of {self.world} {problem}")
            signals = [status["stop"] for status in statuses.values() if status["stop"] is not None]
            if signals and self._stop is not None and self._stop.signal is None:
                self._stop.signal = signals[0]
            # After the request to stop is taken: `meet` must not report a process that left for it as lost.
            self._statuses = statuses
            _stop_if_orphaned()


def several() -> bool:
    """Whether torch has a process group of more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def of_this_run() -> Alone:
    """The processes of this run.

    Example:
        score = harp.accuracy(model, images, labels, peers=harp.peers())
    """
    return _peers() if several() else Alone()


@cache
def _peers() -> Peers:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A separate connection: a collective operation that waits must not block the heartbeat.
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    prefixed = PrefixStore(f"harp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    peers = Peers(prefixed, dist.get_rank(), dist.get_world_size())
    # Python sets `sys.last_value` when it prints an exception that nothing caught.
    atexit.register(lambda: peers.leave(in_order=not hasattr(sys, "last_value")))
    return peers


def was_lost(error: BaseException) -> bool:
    """Whether an error of torch or its backends means that another process is gone."""
    words = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "failed to recv", "socket")
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
    )


def is_supervised() -> bool:
    """Whether `harp.system.distributed.launcher` has started this process, and will report how it ended."""
    return SUPERVISOR in os.environ


def _exit_lost(reason: str) -> None:
    """Exit at once, from the heartbeat thread: the main thread may wait in a collective operation forever."""
    if not is_supervised():
        print(f"error: {reason}; what was saved is kept: go on with the same command", file=sys.stderr, flush=True)
    os._exit(LOST)


def _stop_if_orphaned() -> None:
    """If the launcher has died, ask this process to save and stop, and exit if that takes too long."""
    if is_supervised() and os.getppid() != int(os.environ[SUPERVISOR]):
        del os.environ[SUPERVISOR]
        os.kill(os.getpid(), signal.SIGTERM)
        timer = threading.Timer(_ORPHANED, os._exit, (LOST,))
        timer.daemon = True
        timer.start()
