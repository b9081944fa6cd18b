"""The table of commands, and what every command ends with: one line for an error, and a documented exit code."""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

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
    groups,
    listing,
    plan,
    processes,
    prune,
    push,
    report,
    reproduce,
    run,
    shard,
    signals,
    slim,
    submit,
)
from harp.cli.output import echo
from harp.errors import LOST, HarpError, Interrupted, Lost
from harp.system import text

PIPE_CLOSED = 141
"""The exit code if the reader of the output is gone, as of a program that SIGPIPE ends."""

# What newer versions of typer say of numbers.
_OURS = {
    "Input should be a valid integer, unable to parse string as an integer": "give a whole number",
    "Input should be a valid number, unable to parse string as a number": "give a number",
    "Input should be greater than or equal to": "give at least",
}

# Typer has its own copy of click or uses the real one, by its version.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="harp",
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
        echo(f"harp {__version__}")
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
    "push": push.push,
    "bench": bench.bench,
    "shard": shard.shard,
    "list": listing.list_,
    "plan": plan.plan,
    "doctor": doctor.doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(submit.submit, name="submit")


class _Log(logging.Handler):
    """Prints log records to the current `sys.stderr`, which a live progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line, with the level if it is above INFO."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        print(f"{level}{record.getMessage()}", file=sys.stderr)


def group() -> Any:
    """All commands, with their options in groups."""
    commands = typer.main.get_command(app)
    groups.arrange(commands)
    return commands


def main() -> None:
    """Run the command of this process and exit."""
    # Spinning threads make a shared machine up to 40 times slower. This must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger("harp").handlers = [_Log()]
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where the home folder can't be written
    text.never_fail_to_print()
    try:
        code = _exit_code()
    except SystemExit as end:  # rich exits by itself when the reader of its output is gone
        code = PIPE_CLOSED if isinstance(end.__context__, BrokenPipeError) else end.code
    code = _flushed(code)
    processes.announce_exit(code)
    sys.exit(code)


def _exit_code() -> int | str | None:
    """Run the command; what a user can cause ends in one line and a documented code."""
    try:
        return _invoke()
    except BrokenPipeError:  # as in `harp list models | head -1`
        return PIPE_CLOSED
    except (Exception, KeyboardInterrupt) as error:
        if signals.interrupted() or isinstance(error, KeyboardInterrupt):
            processes.print_once("\nstopped")
            return signals.INTERRUPTED
        if isinstance(error, Interrupted):
            again = f"Go on with the same command: {signals.command_line()}"
            processes.print_once(f"\n{error} ({error.cause}). {again}")
            return error.code
        line = _line(error)
        if line is not None:
            processes.print_error(f"error: {line}")
            return 2
        lost = error if isinstance(error, Lost) else processes.loss_of(error)
        if lost is None:
            raise
        processes.print_loss(lost)
        return LOST


def _invoke() -> int | None:
    """Parse the words and call the command; the code that it exits with."""
    if "_HARP_COMPLETE" in os.environ:  # a shell asks how a word may go on
        app(prog_name="harp")
    try:
        commands = group()
        with commands.make_context("harp", sys.argv[1:] or ["--help"]) as context:
            commands.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _line(error: BaseException) -> str | None:
    """An error that a user can cause in one line; None if it is a fault of HARP."""
    if isinstance(error, HarpError):
        return " ".join(str(error).split())
    if isinstance(error, _UsageError):
        context = error.ctx
        page = f"{context.command_path} --help" if context is not None else "harp --help"
        return f"{_usage(error)} (see {page})"
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return None


def _usage(error: Any) -> str:
    """What is wrong with the words of a command; of an option with its value."""
    message = " ".join(error.format_message().split()).rstrip(".")
    for theirs, ours in _OURS.items():
        message = message.replace(theirs, ours)
    option = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    following = [value for word, value in pairwise(sys.argv) if word == option]
    if not following:
        return message
    theirs = rf"Invalid value for '{re.escape(option)}'( \(env var: '\w+'\))?:"
    return re.sub(theirs, lambda _: f"{option} {following[0]}:", message)


def _flushed(code: int | str | None) -> int | str | None:
    """The exit code, once all output is written: what can't be written must not fail later, without a line."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            code = PIPE_CLOSED
        except OSError as error:  # a full disk
            if stream is sys.stdout:
                processes.print_error(f"error: can't write the output: {error.strerror}")
            code = code or 2
        else:
            continue
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), stream.fileno())
    return code
