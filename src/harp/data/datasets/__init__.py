"""Data sets by their kind: where the files are, how they are read, and whether they are the published ones."""

__all__ = ["base", "image_folder"]
