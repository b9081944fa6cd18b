"""What is pruned, how much of it, and which part."""

__all__ = [
    "allocation",
    "channels",
    "holding",
    "macs",
    "masks",
    "methods",
    "papers",
    "prunable",
    "rounding",
    "schedules",
    "units",
]
