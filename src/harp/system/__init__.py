"""Files, signals, random seeds, progress displays and the processes of a run."""

__all__ = ["distributed", "files", "interrupt", "memory", "progress", "seeds", "states", "tensors", "text"]
