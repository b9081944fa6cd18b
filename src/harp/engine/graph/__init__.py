"""Networks as plain data, and passes over them."""

__all__ = [
    "nodes",
    "reference",
]
