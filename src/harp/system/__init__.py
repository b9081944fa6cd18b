"""Files, signals, random seeds, progress displays and the processes of a run."""

__all__ = [
    "distributed",
    "files",
    "hub",
    "interrupt",
    "library_progress",
    "memory",
    "nearest",
    "notebook",
    "numbers",
    "pickle_scan",
    "progress",
    "seeds",
    "states",
    "table",
    "tensors",
    "text",
]
