"""The command line: thin commands over the library. Nothing heavy is imported before a command needs it."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from harp import __version__
from harp.cli import (
    benching,
    comparing,
    early,
    estimating,
    evaluation,
    exporting,
    looking,
    sharding,
    shrinking,
    training,
    voice,
)
from harp.errors import LOST, HarpError, Interrupted, Lost

app = typer.Typer(
    name="harp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make robust neural networks small: holistic adversarially robust pruning for any PyTorch model.",
    epilog="Start with `harp demo`. Then `harp doctor MODEL` and `harp prune MODEL --data DATA --keep 1%`.",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"harp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    logging.getLogger("harp").setLevel(logging.DEBUG if verbose else logging.INFO)


_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": training.demo,
    "run": training.run,
    "prune": training.prune,
    "compare": comparing.compare,
    "estimate": estimating.estimate,
    "evaluate": evaluation.evaluate,
    "report": evaluation.report,
    "slim": shrinking.slim,
    "export": exporting.export,
    "bench": benching.bench,
    "shard": sharding.shard,
    "list": looking.list_,
    "plan": looking.plan,
    "doctor": looking.doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(evaluation.submit, name="submit")


class _Log(logging.Handler):
    """Print what the library logs to standard error as it is at that moment: a live bar puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line, named by its level where that is more than news."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        print(f"{level}{record.getMessage()}", file=sys.stderr)


def main() -> None:
    """The `harp` command."""
    try:
        _main()
    except SystemExit as end:
        voice.leave(end.code)
        raise


def _main() -> None:
    """One line for what HARP raises on purpose, and exit codes that scripts can use."""
    # Spinning threads starve each other on a shared machine (40 times slower); must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger("harp").handlers = [_Log()]
    try:
        with early.heeded():
            app()
    except HarpError as error:
        voice.say(f"error: {' '.join(str(error).split())}")
        sys.exit(2)
    except Interrupted as stop:
        voice.say_first(f"\n{stop} ({stop.cause}). Go on with the same command: {voice.command()}")
        sys.exit(stop.code)
    except Lost as lost:
        voice.say_lost(lost)
        sys.exit(LOST)
    except RuntimeError as error:
        lost_one = voice.loss(error)
        if lost_one is None:
            raise
        voice.say_lost(lost_one)
        sys.exit(LOST)
    except KeyboardInterrupt:
        voice.say_first("\nstopped")
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        typer.echo(f"error: {error.strerror or error}: {error.filename or ''}", err=True)
        sys.exit(2)
