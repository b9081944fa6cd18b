"""Two processes against one: the throughput of a PGD training, its memory, and what loading the data costs.

Both trainings are the product's own loop on the same global batch, one thread a process, and take turns: while one
works the others wait. Batch norms are synchronised and gradients averaged as in every training of several processes.

ratio     the steps a second of two processes over those of one, by wall time; it needs two free cores.
effort    the same by CPU time, of the busier process: what the exchange and smaller batches cost, whatever else runs.
memory    the highest resident set of each of the two processes in the first half of the steps, and in the second: an
          allocator gives pages back now and then, so single values go up and down, but what leaks raises the peaks.
pipeline  the batches alone, drawn and augmented without a step, relative to a step of one process.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.terminal import Parser, positive, progress, say
from benchmarks.timing import cpu_name, load

from harp.errors import HarpError
from harp.system.distributed.environment import Place

SHAPE, CLASSES = (3, 32, 32), 10
WORKER = "HARP_SCALING"  # set in the processes that train


class Enough(Exception):
    """Ends a training."""


class Group:
    """The processes of one training; they wait for commands."""

    def __init__(self, processes: int, options: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.workers = []
        for rank in range(processes):
            place = Place(rank, processes, rank, processes, port=port)
            environment = {**os.environ, **place.environment(), WORKER: "1", "OMP_NUM_THREADS": "1"}
            words = [sys.executable, __file__, *_words(options)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.workers.append(subprocess.Popen(words, env=environment, **pipes))
        self.answers()  # they are ready

    def work(self, steps: int) -> list[dict[str, Any]]:
        """Let the processes take some steps; return the report of each."""
        for worker in self.workers:
            assert worker.stdin is not None
            print(steps, file=worker.stdin, flush=True)
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """A line of each process, as JSON."""
        lines = [worker.stdout.readline() for worker in self.workers if worker.stdout is not None]
        if not all(lines):
            raise HarpError("a training process has ended")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """End them."""
        for worker in self.workers:
            worker.kill()
            worker.communicate()  # waits, and closes the pipes


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if WORKER in os.environ:
        train(options)
        return 0
    try:
        result = measure(options)
    except HarpError as error:
        print(f"scaling.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Start both trainings, let them take turns, print the table; return the JSON object."""
    say(f"{options.model}: global batch {options.batch}, PGD-{options.steps}, one thread a process, starting")
    groups: dict[str, Group] = {}
    try:
        for name, processes in (("one", 1), ("two", 2)):
            groups[name] = Group(processes, options)
            groups[name].work(1)  # to warm up
        wall, cpu = turns(groups, options)
        say(f"memory: {options.memory} steps of two processes")
        reports = groups["two"].work(options.memory)
        say("the batches alone")
        alone = groups["one"].work(0)[0]["pipeline"]
    finally:
        for group in groups.values():
            group.end()
    seconds = {name: statistics.median(wall[name]) for name in wall}
    effort = {name: statistics.median(cpu[name]) for name in cpu}
    peaks = [_peaks(report["resident"]) for report in reports]
    result = {
        "benchmark": "scaling",
        "model": options.model,
        "batch": options.batch,
        "steps": options.steps,
        "turn": options.turn,
        "repeats": options.repeats,
        "one_seconds": round(seconds["one"], 4),
        "two_seconds": round(seconds["two"], 4),
        "ratio": round(seconds["one"] / seconds["two"], 3),
        "one_cpu_seconds": round(effort["one"], 4),
        "two_cpu_seconds": round(effort["two"], 4),
        "effort": round(effort["one"] / effort["two"], 3),
        "memory_steps": options.memory,
        "memory_peaks_mb": peaks,
        "memory_growth_mb": [round(last - first, 1) for first, last in peaks],
        "pipeline_seconds": round(alone, 5),
        "pipeline_share": round(alone / effort["one"], 4),
        "wall_seconds": {name: [round(second, 4) for second in wall[name]] for name in wall},
        "cpu_seconds": {name: [round(second, 4) for second in cpu[name]] for name in cpu},
        "cpu": cpu_name(),
        "load": load(),
    }
    _table(result)
    return result


def turns(groups: dict[str, Group], options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seconds a step by the clock and by the busier process's CPU, one entry a turn."""
    wall: dict[str, list[float]] = {name: [] for name in groups}
    cpu: dict[str, list[float]] = {name: [] for name in groups}
    show = progress(options.repeats)
    for repeat in range(options.repeats):
        for name in sorted(groups, reverse=repeat % 2 == 1):
            began = time.perf_counter()
            reports = groups[name].work(options.turn)
            wall[name].append((time.perf_counter() - began) / options.turn)
            cpu[name].append(max(report["cpu"] for report in reports) / options.turn)
            show(name, repeat, wall[name][-1])
    return wall, cpu


def train(options: argparse.Namespace) -> None:
    """One of the processes: the product's loop, a step at a time as standard input asks for them."""
    import torch

    from harp import models
    from harp.data.batches import Augment, Batches
    from harp.data.dataset import Split
    from harp.pruning.methods import Dense
    from harp.pruning.units import Weights
    from harp.system.distributed.fabric import launch
    from harp.training.loop import fit
    from harp.training.objectives import PgdTraining

    torch.set_num_threads(1)
    fabric = launch("32-true", "cpu")
    torch.manual_seed(0)
    model = models.build(options.model, num_classes=CLASSES, shape=SHAPE)
    count = 8 * options.batch
    split = Split(torch.randint(256, (count, *SHAPE), dtype=torch.uint8), torch.arange(count) % CLASSES)
    batches = Batches(split, options.batch, augment=Augment())
    turn = _Turn(batches.shard(fabric.global_rank, fabric.world_size))
    turn.ask()
    objective = PgdTraining(steps=options.steps)
    try:
        fit(model, batches, objective, Dense(Weights(model)), epochs=10**6, on_step=turn.step, fabric=fabric)
    except Enough:
        return


class _Turn:
    """Counts the steps of a turn; at its end reports the CPU time and memory, and waits for the next."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.left, self.began = batches, 0, 0.0
        self.resident: list[int] = []

    def step(self, record: Any) -> None:
        self.resident.append(_resident())
        self.left -= 1
        if self.left == 0:
            self.report({"cpu": time.process_time() - self.began, "resident": self.resident})
            self.listen()

    def ask(self) -> None:
        self.report({})
        self.listen()

    def report(self, facts: dict[str, Any]) -> None:
        print(json.dumps(facts), flush=True)

    def listen(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise Enough
        self.left = int(line)
        if self.left == 0:
            self.report({"pipeline": self.pipeline()})
            self.listen()
        self.resident, self.began = [], time.process_time()

    def pipeline(self) -> float:
        """The CPU seconds of a batch, without a step."""
        began, count = time.process_time(), 0
        for epoch in range(4):
            for _ in self.batches(epoch):
                count += 1
        return (time.process_time() - began) / count


def _resident() -> int:
    """The resident set in kilobytes; where the system does not report it, the peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peaks(kilobytes: list[int]) -> list[float]:
    """The highest value of the first and of the second half, in megabytes."""
    middle = len(kilobytes) // 2
    return [round(max(half or kilobytes) / 1024, 1) for half in (kilobytes[:middle], kilobytes[middle:])]


def _table(result: dict[str, Any]) -> None:
    print(f"{'processes':<10} {'wall s':>8} {'cpu s':>8}   a step of batch {result['batch']}")
    for name in ("one", "two"):
        print(f"{name:<10} {result[f'{name}_seconds']:8.3f} {result[f'{name}_cpu_seconds']:8.3f}")
    print(f"two are x{result['ratio']:.2f} as fast by the clock, x{result['effort']:.2f} by CPU time")
    print(f"memory: peaks of both halves of {result['memory_steps']} steps {result['memory_peaks_mb']} MB")
    print(f"the batches alone take {result['pipeline_share']:.2%} of a step")


def _words(options: argparse.Namespace) -> list[str]:
    return ["--model", options.model, "--batch", str(options.batch), "--steps", str(options.steps)]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scaling.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A table and, as the last line of standard output, one JSON object; progress goes to standard error.\n"
        "Example: python benchmarks/scaling.py --model resnet18 --batch 128 --steps 10\n"
        "Quick:   python benchmarks/scaling.py --model resnet8 --batch 16 --steps 1 --turn 1 --repeats 1 --memory 5",
    )
    parser.add_argument("--model", default="resnet8", help="a name (`harp list models`; default: resnet8)")
    parser.add_argument("--batch", default=128, type=positive, help="images a step, of all processes (default: 128)")
    parser.add_argument("--steps", default=10, type=positive, help="steps of the attack (default: 10)")
    parser.add_argument("--turn", default=4, type=positive, help="training steps a turn (default: 4)")
    parser.add_argument("--repeats", default=5, type=positive, help="turns of each (default: 5)")
    parser.add_argument("--memory", default=200, type=positive, help="steps that memory is watched for (default: 200)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
