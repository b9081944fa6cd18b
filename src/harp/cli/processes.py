"""Messages of several processes of one run: what they have in common is printed once."""

import logging
import signal
import sys
from typing import TYPE_CHECKING

from harp.cli import signals
from harp.cli.output import echo
from harp.errors import AT_CHANCE, PROBLEM, UNFINISHED, Lost
from harp.system.distributed import environment

if TYPE_CHECKING:
    from harp.system.progress import Quiet


def display(first: bool) -> "Quiet":
    """The display of one of several processes; all but the first show nothing and log nothing."""
    from harp.system.progress import Quiet, Terminal  # rich is slow to import

    logging.getLogger("harp").disabled = not first
    return Terminal() if first else Quiet()


def print_error(text: str) -> None:
    """Print an error once, even if several processes raise it."""
    place = environment.here()
    if place is None or _is_chosen(text, place.rank):
        process = "" if place is None or place.rank == 0 else f"process {place.rank}: "
        echo(f"{process}{text}", err=True)


def print_once(text: str) -> None:
    """Print a message of all processes once, by rank 0."""
    place = environment.here()
    if place is None or place.rank == 0:
        echo(text, err=True)


def print_loss(lost: Lost) -> None:
    """Print that another process was lost, unless a supervisor reports it."""
    from harp.system.distributed import peers

    place = environment.here()
    if place is None or (not peers.is_supervised() and _is_chosen("", place.rank)):
        echo(f"error: {lost}. What was saved is kept: go on with the same command: {signals.command_line()}", err=True)


def announce_exit(code: object) -> None:
    """Tell the other processes about this exit: they have to end too, unless the code is a regular one."""
    if "torch" in sys.modules:
        from harp.system.distributed import peers

        if peers.several():
            peers.of_this_run().leave(in_order=code in (None, 0, PROBLEM, AT_CHANCE, UNFINISHED, 128 + signal.SIGINT))


def loss_of(error: BaseException) -> Lost | None:
    """The error as `Lost`, if it comes from an exchange with a process that is gone; else None."""
    if "torch" not in sys.modules or not isinstance(error, RuntimeError):
        return None
    from harp.system.distributed import peers

    if not peers.was_lost(error):
        return None
    return Lost(f"another process of the run ended or can't be reached ({' '.join(str(error).split())[:160]})")


def _is_chosen(text: str, rank: int) -> bool:
    """Whether this process prints the text. Any other message makes an empty text superfluous."""
    if "torch" not in sys.modules:
        return rank == 0
    from harp.system.distributed import peers

    return peers.of_this_run().speaks(text) if peers.several() else rank == 0
