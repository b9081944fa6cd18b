"""From a torch model to a graph."""

__all__ = [
    "capture",
]
