"""Who speaks when several processes come to the same end: the first of them, or whoever knows something else."""

import logging
import shlex
import signal
import sys
from typing import TYPE_CHECKING

import typer

from harp.errors import AT_CHANCE, UNFINISHED, Lost
from harp.processes import placement

if TYPE_CHECKING:
    from harp.display import Quiet


def display(first: bool) -> "Quiet":
    """The display of one of several processes: all but the first show nothing and warn of nothing."""
    from harp.display import Quiet, Terminal  # not before a command shows something

    logging.getLogger("harp").disabled = not first
    return Terminal() if first else Quiet()


def say(text: str) -> None:
    """Print an error once, whichever processes meet it."""
    place = placement.here()
    if place is None or _speaks(text, place.rank):
        typer.echo(f"{'' if place is None or place.rank == 0 else f'process {place.rank}: '}{text}", err=True)


def say_first(text: str) -> None:
    """Print what all processes know, once."""
    place = placement.here()
    if place is None or place.rank == 0:
        typer.echo(text, err=True)


def say_lost(lost: Lost) -> None:
    """Print that another process is gone, unless the one who started this one is there to tell it."""
    from harp.processes import peers

    place = placement.here()
    if place is None or (not peers.is_supervised() and _speaks("", place.rank)):
        typer.echo(f"error: {lost}. What was saved is kept: go on with the same command: {command()}", err=True)


def leave(code: object) -> None:
    """Let the other processes know by which exit code this one ends: they have to end too, unless it is in order."""
    if "torch" in sys.modules:
        from harp.processes import peers

        if peers.several():
            peers.of_this_run().leave(in_order=code in (None, 0, AT_CHANCE, UNFINISHED, 128 + signal.SIGINT))


def loss(error: RuntimeError) -> Lost | None:
    """What an exchange with a process that is gone ended with, in one line; None if the error is another one."""
    from harp.processes import peers

    if "torch" not in sys.modules or not peers.was_lost(error):
        return None
    return Lost(f"another process of the run ended or can't be reached ({' '.join(str(error).split())[:160]})")


def command() -> str:
    """The command that was given."""
    return shlex.join(["harp", *sys.argv[1:]])


def _speaks(text: str, rank: int) -> bool:
    """Whether this process is the one to say something; an empty text is one that anything else stands for."""
    if "torch" not in sys.modules:
        return rank == 0
    from harp.processes import peers

    return peers.of_this_run().speaks(text) if peers.several() else rank == 0
