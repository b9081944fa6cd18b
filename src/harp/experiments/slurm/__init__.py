"""Where the runs of a comparison are done: in processes of this machine, or as jobs of a scheduler."""

__all__ = [
    "jobs",
    "scheduler",
    "slurm",
]
