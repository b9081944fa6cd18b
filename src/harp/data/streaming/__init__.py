"""Images that stay in their files: decoded when they are needed, augmented, ahead of the training."""

__all__ = ["images", "workers"]
