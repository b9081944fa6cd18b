"""Files, signals, random seeds, progress displays and the processes of a run."""

__all__ = [
    "distributed",
    "files",
    "interrupt",
    "library_progress",
    "memory",
    "numbers",
    "progress",
    "seeds",
    "states",
    "tensors",
]
