"""What two processes agree on, for `test_checkpointing`: each writes its results.

keeper_job.py FOLDER RANK PORT
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harp.errors import DiskError, Diverged, Interrupted
from harp.system.interrupt import Stop
from harp.system.states import States
from harp.training import checkpointing as keeper_module
from harp.training.checkpointing import Keeper
from harp.training.divergence import Guard


class Fabric:
    """The attributes of a fabric that are used."""

    def __init__(self) -> None:
        self.world_size, self.global_rank, self.device = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
        self.is_global_zero = self.global_rank == 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]


def state(step: int) -> dict[str, Any]:
    return {"epoch": 0, "step": step, "x": torch.zeros(10)}


def stopped(folder: Path, fabric: Fabric, stop: Stop, at: int, number: int | None) -> list[Any]:
    """Steps until the training is stopped, by a signal to rank 1 at a step or by its time limit."""
    keeper = Keeper(folder / "state.pt", stop, fabric=fabric)
    with stop.on_signals():
        for step in range(1, 100_000):
            time.sleep(0.001)
            if fabric.global_rank == 1 and step == at and number is not None:
                os.kill(os.getpid(), number)
            if keeper.due():
                try:
                    keeper.save(state(step))
                except (Interrupted, DiskError) as error:
                    return [type(error).__name__, str(error), getattr(error, "signal", None)]
    return []


class Clock:
    """A clock that the job moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def asked(folder: Path, fabric: Fabric) -> int:
    """The number of exchanges in three seconds of steps of 10 ms."""
    clock, calls = Clock(), 0
    keeper_module.time = clock  # type: ignore[assignment]
    keeper = Keeper(folder / "state.pt", Stop(), fabric=fabric)
    exchange = keeper._most

    def counted(*values: float) -> Any:
        nonlocal calls
        calls += 1
        return exchange(*values)

    keeper._most = counted  # type: ignore[method-assign]
    for _ in range(300):
        clock.now += 0.01
        keeper.due()
    keeper_module.time = time
    return calls


def diverged(fabric: Fabric) -> list[str]:
    """The loss of rank 1 is NaN at the third step, the gradient of rank 0 at the fifth."""
    messages = []
    for what in ("loss", "gradient"):
        weight = torch.ones(3, requires_grad=True)
        guard = Guard({"w": weight}, fabric)
        try:
            for step in range(1, 8):
                bad = float("nan")
                weight.grad = torch.full((3,), bad if (what, step, fabric.global_rank) == ("gradient", 5, 0) else 1.0)
                guard.watch(bad if (what, step, fabric.global_rank) == ("loss", 3, 1) else 1.0, f"step {step}")
                dist.barrier()  # a process that is alone in it would wait for ever
        except Diverged as error:
            messages.append(str(error))
    return messages


def main() -> None:
    """All cases, one after the other."""
    folder, rank, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    fabric = Fabric()
    results: dict[str, Any] = {"asked": asked(folder / "asked", fabric)}
    results["signal"] = stopped(folder / "signal", fabric, Stop(), 40, signal.SIGUSR1)
    limit = Stop(0.02) if rank == 1 else Stop()  # the time limit of one process stops both
    results["time"] = stopped(folder / "time", fabric, limit, 0, None)
    refused = folder / "refused"
    if rank == 0:
        refused.write_text("a file where a folder should be")
    dist.barrier()
    results["disk"] = stopped(refused, fabric, Stop(), 5, signal.SIGTERM)
    if rank == 0:
        states = States(folder / "damaged" / "state.pt")
        for step in (1, 2):
            states.save(state(step))
        states.path.write_bytes(states.path.read_bytes()[:100])
    dist.barrier()
    loaded = Keeper(folder / "damaged" / "state.pt", Stop(), fabric=fabric).load()
    results["loaded"] = None if loaded is None else loaded["step"]
    results["diverged"] = diverged(fabric)
    (folder / f"results.{rank}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
