"""The training loop, its objectives, and its checkpoints."""

__all__ = [
    "checkpointing",
    "free_at",
    "loop",
    "metrics",
    "objectives",
]
