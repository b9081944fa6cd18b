"""Everything HARP raises on purpose.

    HarpError
    ├── RecipeError      a recipe or an argument that makes no sense
    ├── BudgetError      a budget that no allocation can meet
    ├── DataError        a data set that is missing, damaged or not what it should be
    ├── ModelError       a model that can't be built, attacked or pruned
    ├── CheckpointError  a file that can't be read, trusted, matched or written
    └── MissingExtra     an optional dependency that is not installed

    Interrupted          not an error: somebody asked the work to stop, and it was saved

The message of a `HarpError` is one line: what is wrong, the value, and what would be right. The command line
prints just that line and exits with 2.
"""


class HarpError(Exception):
    """The root: catch this to catch all that HARP raises on purpose."""


class RecipeError(HarpError, ValueError):
    """A recipe or an argument that makes no sense."""


class BudgetError(HarpError, ValueError):
    """A budget that no allocation can meet."""


class DataError(HarpError, ValueError):
    """A data set that is missing, damaged or not what it should be."""


class ModelError(HarpError, ValueError):
    """A model that can't be built, attacked or pruned."""


class CheckpointError(HarpError, ValueError):
    """A file that can't be read, trusted, matched or written."""


class MissingExtra(HarpError, ImportError):
    """An optional dependency that is not installed."""


class Interrupted(Exception):
    """Somebody asked the work to stop (Ctrl-C, SIGTERM); the state was saved first."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
