"""Start the processes of this machine, and make sure that they all end.

    harp run RECIPE --devices 4             the command waits for four processes, which run the same command line

Every signal is forwarded to each process once. When one process fails, the others first get time to notice it and end,
then they are asked to end and finally killed; the command reports what happened and exits with a nonzero code. If the
launcher itself is killed, its processes end too (see `harp.system.distributed.peers`).
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
from harp.system.distributed import affinity
from harp.system.distributed.environment import PORT, Place, read_address
from harp.system.interrupt import SIGNALS, handled

SUPERVISOR = "HARP_SUPERVISOR"  # the environment variable with the process id of the launcher

_STOPPED = (UNFINISHED, 128 + signal.SIGINT)  # the exit codes of a process that was asked to stop
# Seconds after the first failure until the other processes are killed. A process that works does not end before all
# have saved, see `harp.system.distributed.peers`: one that still runs by then is starting up and waits for the others.
PATIENCE = 15.0
FIRMLY = 5.0  # seconds after the first failure until the other processes get a SIGTERM


def supervise(devices: int, nodes: int = 1, node: int = 0, address: str | None = None, *, on_cpu: bool = False) -> int:
    """Run this command once for each device, and return the exit code for the whole run.

    `address` is HOST or HOST:PORT of the first machine; with several machines every one needs it. With `on_cpu` the
    processes divide the cores among them.
    """
    host, port = read_address("127.0.0.1" if address is None else address)
    port = port or (PORT if nodes > 1 else _free_port())
    places = [
        Place(node * devices + local, nodes * devices, local, devices, node, nodes, host, port)
        for local in range(devices)
    ]
    command = [sys.executable, *sys.orig_argv[1:]]
    children: list[subprocess.Popen[bytes]] = []
    with _received_signals(children) as received:
        try:
            for place in places:
                environment = {**os.environ, **place.environment(), SUPERVISOR: str(os.getpid())}
                if on_cpu:
                    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(affinity.usable()) // devices)))
                # Separate process groups: a Ctrl-C must reach every process once, through the launcher.
                child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
                children.append(child)
            codes = _wait(children, received)
        finally:
            _kill(children)
    return exit_code(codes, places, received)


def _wait(children: list[subprocess.Popen[bytes]], received: list[int]) -> dict[int, int]:
    """Wait until all have ended, or `PATIENCE` has passed since the first failure; return their exit codes.

    Exit codes after our own SIGTERM are left out. Signals are forwarded here, also those received during start-up: only
    now can they reach all processes, each of them once.
    """
    codes: dict[int, int] = {}
    first_failure: float | None = None
    terminated = False
    forwarded = 0
    while None in [child.poll() for child in children]:
        for number in received[forwarded:]:
            _send(children, number)
            forwarded += 1
        for local, child in enumerate(children):
            if child.returncode is not None and not terminated:
                codes.setdefault(local, child.returncode)
        if first_failure is None and any(codes.values()):
            first_failure = time.monotonic()
        since_failure = 0.0 if first_failure is None else time.monotonic() - first_failure
        if since_failure > FIRMLY and not terminated:
            terminated = True  # a process that does not communicate has not noticed the failure, but can still save
            _send(children, signal.SIGTERM)
        if since_failure > PATIENCE:
            break
        time.sleep(0.05)
    return codes if terminated else {local: child.returncode for local, child in enumerate(children)}


def exit_code(codes: Mapping[int, int], places: list[Place], received: list[int]) -> int:
    """The exit code of the run; raises `Lost` if a process was ended by a signal that the launcher did not receive."""
    # A process that had no signal handlers yet is ended by a forwarded signal itself.
    by_signal = {-number: 128 + number for number in received}
    if signal.SIGINT in received:
        by_signal[1] = 128 + signal.SIGINT  # a Python that is interrupted while it starts exits with 1
    failures = {local: by_signal.get(code, code) for local, code in codes.items() if code}
    killed = next((local for local, code in failures.items() if code < 0), None)
    if killed is not None:
        place, name = places[killed], signal.Signals(-failures[killed]).name
        hint = " (was the memory used up?)" if name == "SIGKILL" else ""
        raise Lost(f"process {place.rank} of {place.world} was ended by {name}{hint}, and so the others were ended too")
    if failures and all(code == LOST for code in failures.values()):
        raise Lost("another process of the run, not one of this machine's, ended or can't be reached")
    own = {local: code for local, code in failures.items() if code != LOST}
    errors = {local: code for local, code in own.items() if code not in _STOPPED and code not in by_signal.values()}
    relevant = errors or own  # an error is the reason why the others saved and stopped
    return relevant.get(0, next(iter(relevant.values()), 0))


@contextlib.contextmanager
def _received_signals(children: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Collect the signals to forward to the children, and suspend them together with this process."""
    received: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    def suspend(number: int, frame: FrameType | None) -> None:
        _send(children, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _send(children, signal.SIGCONT)

    handlers = {**dict.fromkeys(SIGNALS, collect), signal.SIGTSTP: suspend}
    # Signals that are ignored, as by nohup, stay ignored.
    with handled({number: how for number, how in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}):
        yield received


def _send(children: list[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _kill(children: list[subprocess.Popen[bytes]]) -> None:
    """Kill the process groups of all children, which include the processes that they have started."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
