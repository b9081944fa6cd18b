"""What the processes of a run tell each other beside the exchange of gradients.

Each has a pulse: every few seconds it leaves a note in the store that the processes met at, from a thread of its own,
and reads the notes of the others. So one that has died, or whose machine has, is noticed wherever the others are; a
request to stop that reached one process reaches all; and the first one can show how far all have come. Processes that
work apart for hours, as in an evaluation, meet through the store too, which no time limit of an exchange cuts short.
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
from torch._C._distributed_c10d import PrefixStore, TCPStore

from harp.errors import LOST, Lost
from harp.processes.supervisor import SUPERVISOR

BEAT = 2.0  # seconds between two notes
LATE = 30  # beats without a new note of another process, after which it counts as dead
_SAVING = 60.0  # seconds to save and end once the one who started this process is gone
_LEFT = -1  # the number of a note that is the last

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

    def gather(self, value: T) -> list[T]:
        """The values of all, in their order."""
        return [value]

    def first(self, value: T) -> T:
        """The first one's value."""
        return value


class Peers(Alone):
    """One of several processes."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own: an exchange that waits must not keep the pulse from beating.
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._store = PrefixStore(f"harp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        self._stop: Stop | None = None
        self._beat, self._done, self._meetings = 0, 0.0, 0
        self._notes: dict[int, dict[str, Any]] = {}
        self._over = threading.Event()
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        atexit.register(self.leave)

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
            wait()
            left = [rank for rank, note in list(self._notes.items()) if note["beat"] == _LEFT]
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

    def leave(self) -> None:
        """Tell the others that nothing more will come from here."""
        self._over.set()
        self._beat = _LEFT
        try:
            self._store.set(f"pulse/{self.rank}", self._note())
        except RuntimeError:  # the first one, who keeps the notes, has gone before
            return

    def _note(self) -> str:
        asked = None if self._stop is None else self._stop.signal
        return json.dumps({"beat": self._beat, "stop": asked, "work": self._meetings, "done": self._done})

    def _pulse(self) -> None:
        missed = dict.fromkeys(range(self.world), 0)
        while not self._over.wait(BEAT):
            self._beat += 1
            try:
                self._store.set(f"pulse/{self.rank}", self._note())
                keys = [f"pulse/{rank}" for rank in missed if self._store.check([f"pulse/{rank}"])]
                texts = self._store.multi_get(keys)
                notes = {int(key[6:]): json.loads(text) for key, text in zip(keys, texts, strict=True)}
            except RuntimeError:
                if not self._over.wait(2 * BEAT):  # at the end of all work the first may be gone before the others
                    _end("the first process of the run can't be reached")
                return
            for rank, note in notes.items():
                missed[rank] = 0 if note != self._notes.get(rank) or note["beat"] == _LEFT else missed[rank] + 1
                if missed[rank] > LATE:
                    _end(f"process {rank} of {self.world} gave no sign of life for {LATE * BEAT:.0f} seconds")
            self._notes = notes
            self._heed([note["stop"] for note in notes.values() if note["stop"] is not None])
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
    return Peers()


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
        last = threading.Timer(_SAVING, os._exit, (LOST,))
        last.daemon = True
        last.start()
