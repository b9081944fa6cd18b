"""Recipes, runs and what they leave on disk."""

__all__ = [
    "artefact",
    "build",
    "compare",
    "compose",
    "energy",
    "estimate",
    "image_size",
    "plan",
    "presets",
    "recipe",
    "records",
    "reproduction",
    "run",
    "run_folder",
    "slurm",
    "study",
    "table",
]
