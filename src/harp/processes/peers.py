"""What the processes of a run tell each other beside the exchange of gradients.

Each has a pulse: every few seconds it leaves a note in the store that the processes met at, from a thread of its own,
and reads the notes of the others. So one that has died, or whose machine has, is noticed wherever the others are; a
request to stop that reached one process reaches all; and the first one can show how far all have come. Processes that
work apart for hours, as in an evaluation, meet through the store too, which no time limit of an exchange cuts short.
The last note of a process says whether it ended in order; if not, the others end soon after it.
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
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from harp.errors import LOST, Lost
from harp.processes.supervisor import SUPERVISOR

BEAT = 2.0  # seconds between two notes
LATE = 30  # beats without a new note of another process, after which it counts as dead
GRACE = 3  # beats after another process failed: it may fail here too, and whoever started it asks for a state first
SAVING = 120.0  # seconds that a process which is to stop waits at most until the others have saved, too
_ORPHANED = 60.0  # seconds to save and end once the one who started this process is gone

T = TypeVar("T")


class Stop(Protocol):
    """A request to stop, see `harp.keeper.Stop`."""

    signal: int | None


class Alone:
    """A process that works by itself."""

    rank, world = 0, 1

    def listen(self, stop: Stop) -> None:
        """Tell the others of a request to stop, and let theirs be one here."""

    def tell(self, done: float) -> None:
        """Let the others know how much is done here."""

    def done(self) -> float | None:
        """How much is done by all of them, as far as is known; None if only this process's part counts."""
        return None

    def meet(self, wait: Callable[[], None] = lambda: None) -> None:
        """Go on when all are here, however long that takes; `wait` is called meanwhile and may raise."""

    def speaks(self, text: str) -> bool:
        """Whether this process is to say what others may say too; an empty text is one that any other stands for."""
        return True

    def leave(self, in_order: bool = True) -> None:
        """Tell the others that nothing more will come from here, and whether that is as it should be."""

    def gather(self, value: T) -> list[T]:
        """The values of all, in their order."""
        return [value]

    def first(self, value: T) -> T:
        """The first one's value."""
        return value


class Peers(Alone):
    """One of several processes, which leave notes for each other in a store."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.rank, self.world, self._store = rank, world, store
        self._stop: Stop | None = None
        self._beat, self._done, self._meetings = 0, 0.0, 0
        self._left: bool | None = None  # whether it was in order, once this process has left
        self._notes: dict[int, dict[str, Any]] = {}
        self._over = threading.Event()
        self._tell()
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()

    def listen(self, stop: Stop) -> None:
        """Tell the others of a request to stop, and let theirs be one here."""
        self._stop = stop

    def tell(self, done: float) -> None:
        """Let the others know how much is done here."""
        self._done = done

    def done(self) -> float | None:
        """How much is done by all of them, as far as is known."""
        others = [note for rank, note in list(self._notes.items()) if rank != self.rank]
        return self._done + sum(float(note["done"]) for note in others if note["work"] == self._meetings)

    def meet(self, wait: Callable[[], None] = lambda: None) -> None:
        """Go on when all are here, however long that takes; `wait` is called meanwhile and may raise."""
        key = f"meeting/{self._meetings}"
        present, pause = self._store.add(key, 1), 0.01
        while present < self.world:
            left = [rank for rank, note in list(self._notes.items()) if note["left"] is not None]
            wait()
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)
            present = self._store.add(key, 0)
            if left and present < self.world:
                raise Lost(f"process {left[0]} of {self.world} ended before its work was done")
        self._meetings, self._done = self._meetings + 1, 0.0

    def speaks(self, text: str) -> bool:
        """Whether the first process has not said it within two seconds, and is still there."""
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
        """The values of all, in their order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def first(self, value: T) -> T:
        """The first one's value."""
        found = [value]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def leave(self, in_order: bool = True) -> None:
        """Tell the others that nothing more will come from here, and whether that is as it should be.

        In order the first process, who keeps the notes, goes last; and if all are to stop they go together: whoever
        started them may take the first that is gone for a reason to end the others, which still save.
        """
        if self._left is not None:
            return
        self._left = in_order
        self._over.set()
        try:
            self._tell()
            if in_order and (self.rank == 0 or (self._stop is not None and self._stop.signal is not None)):
                self._see_off()
        except RuntimeError:  # the first one has gone before
            return

    def _see_off(self) -> None:
        """Wait until all others have left, but not for ever."""
        end, pause = time.monotonic() + SAVING, 0.01
        while any(note["left"] is None for note in self._read().values()) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)

    def _tell(self) -> None:
        asked = None if self._stop is None else self._stop.signal
        note = {"beat": self._beat, "left": self._left, "stop": asked, "work": self._meetings, "done": self._done}
        self._store.set(f"pulse/{self.rank}", json.dumps(note))

    def _read(self) -> dict[int, dict[str, Any]]:
        keys = [key for rank in range(self.world) if self._store.check([key := f"pulse/{rank}"])]
        texts = self._store.multi_get(keys)
        return {int(key[6:]): json.loads(text) for key, text in zip(keys, texts, strict=True)}

    def _pulse(self) -> None:
        missed = dict.fromkeys(range(self.world), 0)
        while not self._over.wait(BEAT):
            self._beat += 1
            try:
                self._tell()
                notes = self._read()
            except RuntimeError:
                if not self._over.wait(2 * BEAT):  # at the end of all work the first may be gone before the others
                    _end("the first process of the run can't be reached")
                return
            for rank, note in notes.items():
                missed[rank] = 0 if note != self._notes.get(rank) or note["left"] else missed[rank] + 1
                if missed[rank] > (LATE if note["left"] is None else GRACE):
                    failed = f"gave no sign of life for {LATE * BEAT:.0f} seconds" if note["left"] is None else "failed"
                    _end(f"process {rank} of {self.world} {failed}")
            self._heed([note["stop"] for note in notes.values() if note["stop"] is not None])
            self._notes = notes  # not before: who left because all are to stop is no loss
            _mind_the_supervisor()

    def _heed(self, asked: list[int]) -> None:
        if asked and self._stop is not None and self._stop.signal is None:
            self._stop.signal = asked[0]


def several() -> bool:
    """Whether this process works with others: whether torch has a process group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def of_this_run() -> Alone:
    """The processes that this one works with."""
    return _peers() if several() else Alone()


@cache
def _peers() -> Peers:
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A connection of its own: an exchange that waits must not keep the pulse from beating.
    store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    own = PrefixStore(f"harp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    found = Peers(own, dist.get_rank(), dist.get_world_size())
    # The variable is there once Python has printed an exception that nobody caught.
    atexit.register(lambda: found.leave(in_order=not hasattr(sys, "last_value")))
    return found


def was_lost(error: BaseException) -> bool:
    """Whether an exchange failed because another process is gone, by what torch and its backends raise then."""
    words = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "failed to recv", "socket")
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
    )


def is_supervised() -> bool:
    """Whether `harp.processes.supervisor` has started this process, and will tell how it ended."""
    return SUPERVISOR in os.environ


def _end(reason: str) -> None:
    """End at once, from a thread: the main one may wait for what will never come."""
    if not is_supervised():
        print(f"error: {reason}; what was saved is kept: go on with the same command", file=sys.stderr, flush=True)
    os._exit(LOST)


def _mind_the_supervisor() -> None:
    """Save and end when the one who started this process is gone."""
    if is_supervised() and os.getppid() != int(os.environ[SUPERVISOR]):
        del os.environ[SUPERVISOR]
        os.kill(os.getpid(), signal.SIGTERM)
        last = threading.Timer(_ORPHANED, os._exit, (LOST,))
        last.daemon = True
        last.start()
