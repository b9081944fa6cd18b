"""Files, signals, random seeds, progress displays and the processes of a run."""

__all__ = ["distributed", "files", "interrupt", "memory", "pickle_scan", "progress", "seeds", "states", "tensors"]
