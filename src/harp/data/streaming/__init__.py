"""Images that stay in their files: decoded when they are asked for, augmented, ahead of the training."""

__all__ = [
    "images",
    "unreadable",
    "workers",
]
