"""Run a command or a piece of Python in a process of its own, in a given folder.

The processes are forked from a server that has imported torch and nothing of HARP: that saves the seconds of importing
torch, and nothing else is shared.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SECONDS = 250


def run(work: Callable[..., None], folder: Path, *arguments: Any) -> tuple[int, str]:
    """Call `work` in a process whose home and working directory is `folder`: its exit code, and what it printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    log = folder / ".output"
    process = context.Process(target=_start, args=(folder, log, work, arguments))
    process.start()
    process.join(_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -1, f"not done after {_SECONDS} s: {log.read_text('utf-8')}"
    return process.exitcode, log.read_text("utf-8")


def run_long(folder: Path, words: list[str]) -> tuple[int, str]:
    """Run a `harp` command that takes longer than importing torch does, or that starts processes itself."""
    command = [sys.executable, "-m", "harp", *words]
    environment = os.environ | _environment(folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _environment(folder: Path) -> dict[str, str]:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / ".cache"), **shared}


def command(words: list[str]) -> None:
    """The `harp` command."""
    sys.argv = [str(Path(sys.executable).parent / "harp"), *words]
    from harp import cli

    cli.main()


def _start(folder: Path, log: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    # Streams of pytest would be inherited: they write elsewhere.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(folder)
    os.environ |= _environment(folder)
    sys.path.insert(0, str(folder))
    import torch

    torch.set_num_threads(1)
    work(*arguments)
