"""The training loop, its objectives, and its checkpoints."""

__all__ = [
    "base",
    "checkpointing",
    "free_at",
    "loop",
    "metrics",
    "objectives",
]
