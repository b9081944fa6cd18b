"""The command line: thin commands over the library. Heavy modules are imported only by the commands that need them."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from harp import __version__
from harp.cli import (
    bench,
    compare,
    demo,
    doctor,
    estimate,
    evaluate,
    export,
    listing,
    plan,
    processes,
    prune,
    report,
    reproduce,
    run,
    shard,
    signals,
    slim,
    submit,
)
from harp.errors import LOST, HarpError, Interrupted, Lost

app = typer.Typer(
    name="harp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make robust neural networks small: holistic adversarially robust pruning for any PyTorch model.",
    epilog="""Start with `harp demo`. Then `harp doctor MODEL` and `harp prune MODEL --data DATA --keep 1%`.

    Exit codes: 0 finished; 1 finished, but with a problem that is printed; 2 wrong input or a failure, in one line;
    3 finished, but the network answers at chance level; 75 saved, run the same command again; 76 another process was
    lost, run it again; 130 Ctrl-C.""",
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
    "demo": demo.demo,
    "run": run.run,
    "prune": prune.prune,
    "compare": compare.compare,
    "reproduce": reproduce.reproduce,
    "estimate": estimate.estimate,
    "evaluate": evaluate.evaluate,
    "report": report.report,
    "slim": slim.slim,
    "export": export.export,
    "bench": bench.bench,
    "shard": shard.shard,
    "list": listing.list_,
    "plan": plan.plan,
    "doctor": doctor.doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(submit.submit, name="submit")

__all__ = [
    "main",
]


class _Log(logging.Handler):
    """Prints log records to the current `sys.stderr`, which a live progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line, with the level if it is above INFO."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        print(f"{level}{record.getMessage()}", file=sys.stderr)


def main() -> None:
    """The `harp` command."""
    try:
        _main()
    except SystemExit as end:
        processes.announce_exit(end.code)
        raise


def _main() -> None:
    """Print HARP's own errors as one line, and exit with documented codes."""
    # Spinning threads make a shared machine up to 40 times slower. This must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger("harp").handlers = [_Log()]
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where the home folder can't be written
    try:
        with signals.exit_on_signals():
            app()
    except HarpError as error:
        processes.print_error(f"error: {' '.join(str(error).split())}")
        sys.exit(2)
    except Interrupted as stop:
        again = f"Go on with the same command: {processes.command_line()}"
        processes.print_once(f"\n{stop} ({stop.cause}). {again}")
        sys.exit(stop.code)
    except (Lost, RuntimeError) as error:
        lost = error if isinstance(error, Lost) else processes.loss_of(error)
        if lost is None:
            raise
        processes.print_loss(lost)
        sys.exit(LOST)
    except KeyboardInterrupt:
        processes.print_once("\nstopped")
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        typer.echo(f"error: {error.strerror or error}: {error.filename or ''}", err=True)
        sys.exit(2)
