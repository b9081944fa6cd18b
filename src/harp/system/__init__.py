"""Files, signals, random seeds, progress displays and the processes of a run."""

__all__ = [
    "distributed",
    "files",
    "interrupt",
    "memory",
    "nearest",
    "pickle_scan",
    "progress",
    "seeds",
    "states",
    "table",
    "tensors",
    "text",
]
