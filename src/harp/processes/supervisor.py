"""Starting the processes of this machine, and seeing to it that they all end.

    harp run RECIPE --devices 4             the command waits, four processes with its own command line do the work

Signals go to all of them, once. When one ends too soon the others get a moment to notice and end by themselves, then
they are ended; the command says what happened, and exits with a code that is not zero. Nothing is left behind: should
this process be killed, those that it started end as well (see `harp.processes.peers`).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType

from harp.errors import LOST, UNFINISHED, Lost
from harp.processes import cores
from harp.processes.placement import PORT, Place, read_address

SUPERVISOR = "HARP_SUPERVISOR"  # the variable by which a process knows who started it

_ORDERLY = (UNFINISHED, 128 + signal.SIGINT)  # the exit codes of a process that was asked to stop
# Seconds for the others once one has ended. Those that work on something do not end before all have saved it, see
# `harp.processes.peers`: who still runs then is about to start, and waits for one that will not come.
_PATIENCE = 15.0
_FIRMLY = 5.0  # of these, how long before they are asked to
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def supervise(devices: int, nodes: int = 1, node: int = 0, address: str | None = None, *, on_cpu: bool = False) -> int:
    """Run this very command once for each device, and give the exit code that they come to.

    `address` is the first machine's as HOST or HOST:PORT; among several machines each needs it. Those that compute
    `on_cpu` get their share of its cores each.
    """
    host, port = read_address("127.0.0.1" if address is None else address)
    port = port or (PORT if nodes > 1 else _free_port())
    places = [
        Place(node * devices + local, nodes * devices, local, devices, node, nodes, host, port)
        for local in range(devices)
    ]
    command = [sys.executable, *sys.orig_argv[1:]]
    children: list[subprocess.Popen[bytes]] = []
    with _listening(children) as heard:
        try:
            for place in places:
                environment = {**os.environ, **place.environment(), SUPERVISOR: str(os.getpid())}
                if on_cpu:
                    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(cores.usable()) // devices)))
                # Groups of their own: the terminal's Ctrl-C is to reach each of them once, through here.
                child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
                children.append(child)
            codes = _wait(children, heard)
        finally:
            _end(children)
    return _judge(codes, places, heard)


def _wait(children: list[subprocess.Popen[bytes]], heard: list[int]) -> dict[int, int]:
    """Wait for all to end, from the first failure on with limited patience; the codes of those not asked to end.

    What is heard meanwhile is passed on, and what was heard while they were being started: no earlier than now can all
    of them get it, and each gets it once.
    """
    codes: dict[int, int] = {}
    failed: float | None = None
    asked = False
    passed_on = 0
    while None in [child.poll() for child in children]:
        for number in heard[passed_on:]:
            _send(children, number)
            passed_on += 1
        for local, child in enumerate(children):
            if child.returncode is not None and not asked:
                codes.setdefault(local, child.returncode)
        if failed is None and any(codes.values()):
            failed = time.monotonic()
        late = 0.0 if failed is None else time.monotonic() - failed
        if late > _FIRMLY and not asked:
            asked = True  # who computes for itself does not notice, but can still save what it has
            _send(children, signal.SIGTERM)
        if late > _PATIENCE:
            break
        time.sleep(0.05)
    return codes if asked else {local: child.returncode for local, child in enumerate(children)}


def _judge(codes: Mapping[int, int], places: list[Place], heard: list[int]) -> int:
    """The exit code of it all; raise `Lost` if a process was ended by something that it was not told of."""
    told = {-number: 128 + number for number in heard}  # it had not begun to listen
    if signal.SIGINT in heard:
        told[1] = 128 + signal.SIGINT  # Python itself was not up yet: its own start fails with 1
    failures = {local: told.get(code, code) for local, code in codes.items() if code}
    killed = next((local for local, code in failures.items() if code < 0), None)
    if killed is not None:
        place, name = places[killed], signal.Signals(-failures[killed]).name
        more = " (was the memory used up?)" if name == "SIGKILL" else ""
        raise Lost(f"process {place.rank} of {place.world} was ended by {name}{more}, and so the others were ended too")
    if failures and all(code == LOST for code in failures.values()):
        raise Lost("another process of the run, not one of this machine's, ended or can't be reached")
    own = {local: code for local, code in failures.items() if code != LOST}
    wrong = {local: code for local, code in own.items() if code not in _ORDERLY and code not in told.values()}
    found = wrong or own  # what the others saved and ended for
    return found.get(0, next(iter(found.values()), 0))


@contextlib.contextmanager
def _listening(children: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Note the signals that are for the children, and pause together with them."""
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    def pause(number: int, frame: FrameType | None) -> None:
        _send(children, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _send(children, signal.SIGCONT)

    handlers = {getattr(signal, name): note for name in _PASSED_ON} | {signal.SIGTSTP: pause}
    wanted = {number: handler for number, handler in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(children: list[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with all that it has started."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        child.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
