"""What benchmarks share at the terminal: arguments with one-line errors, progress on standard error."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Errors are one line, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def progress(repeats: int) -> Callable[[str, int, float], None]:
    """A function that prints a line for every variant that was timed."""
    return lambda name, repeat, seconds: say(f"  repeat {repeat + 1}/{repeats}  {name:<6} {seconds:8.2f} s")


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
