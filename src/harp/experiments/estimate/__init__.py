"""What a recipe will take: time, memory, disk and energy, from a few measured steps or from counted operations."""

__all__ = [
    "known",
    "plan",
    "stages",
]
