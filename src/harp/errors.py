"""Everything HARP raises on purpose.

    HarpError
    ├── RecipeError      a recipe or an argument that makes no sense
    │   └── BudgetError  a budget that no allocation can meet
    ├── DataError        a data set that is missing, damaged or not what it should be
    ├── ModelError       a model that can't be built, attacked or pruned
    │   └── Diverged     a training whose numbers are no longer finite
    ├── CheckpointError  a file that can't be read, trusted, matched or written
    │   ├── DiskError    a file that the system doesn't take: no space, over the quota, read-only, not permitted
    │   └── RunFolderError   a run's folder that is missing, unfinished or damaged
    ├── SchedulerError   a cluster's scheduler that is missing, refuses a job or can't be understood
    └── MissingExtra     an optional dependency that is not installed

    Lost                 no fault of this process: another one of the run ended or can't be reached
    Interrupted          not an error: somebody asked the work to stop, or its time is over, and it was saved

The message of a `HarpError` is one line: what is wrong, the value, and what would be right. The command line
prints just that line and exits with 2.
"""

import signal

PROBLEM = 1
"""The exit code of a command that finished, but with a problem that it printed, such as a check that failed."""

AT_CHANCE = 3
"""The exit code of a run that finished with a network that answers at chance level; all its files are there."""

UNFINISHED = 75
"""The exit code of a command that saved its work and goes on when it is run again (EX_TEMPFAIL)."""

LOST = 76
"""The exit code of a command one of whose processes died (EX_PROTOCOL); it goes on when it is run again, too."""

TIME_IS_UP = 14
"""What `Interrupted.signal` is when the time was over: SIGALRM, by its number as Windows has no name for it."""


class HarpError(Exception):
    """The root: catch this to catch all that HARP raises on purpose.

    Example:
        try:
            harp.Magnitude(harp.Weights(model), keep=2.0)
        except harp.HarpError as error:
            print(error)
    """


class RecipeError(HarpError, ValueError):
    """A recipe or an argument that makes no sense."""


class BudgetError(RecipeError):
    """A budget that no allocation can meet."""


class DataError(HarpError, ValueError):
    """A data set that is missing, damaged or not what it should be."""


class ModelError(HarpError, ValueError):
    """A model that can't be built, attacked or pruned."""


class Diverged(ModelError):
    """A training whose loss, gradients or weights are no longer finite numbers."""


class CheckpointError(HarpError, ValueError):
    """A file that can't be read, trusted, matched or written."""


class DiskError(CheckpointError):
    """A file that the system doesn't take: no space, over the quota, read-only, not permitted."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full  # whether there is no room, which may change


class RunFolderError(CheckpointError):
    """A run's folder that is missing, unfinished or damaged: the file, what is wrong with it, and what to do."""

    def __str__(self) -> str:
        return "{} {} ({})".format(*self.args)


class SchedulerError(HarpError, RuntimeError):
    """A cluster's scheduler that is missing, refuses a job or can't be understood."""


class MissingExtra(HarpError, ImportError):
    """An optional dependency that is not installed."""


class Lost(Exception):
    """Another process of the run ended or can't be reached; what was saved is kept."""


class Interrupted(Exception):
    """Somebody asked the work to stop (a signal), or its time is over; the state was saved first."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal

    @property
    def code(self) -> int:
        """The command's exit code: 130 for Ctrl-C as always, else the one that means: run it again."""
        return 128 + signal.SIGINT if self.signal == signal.SIGINT else UNFINISHED

    @property
    def cause(self) -> str:
        """What it was stopped by, for people."""
        if self.signal == TIME_IS_UP:
            return "its time is over"
        return "Ctrl-C" if self.signal == signal.SIGINT else signal.Signals(self.signal).name
