"""What a recipe takes: time, memory, disk and energy, from a few steps that are measured on this machine."""

__all__ = ["sizes", "stages"]
