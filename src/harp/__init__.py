"""HARP: holistic adversarially robust pruning."""

__version__ = "0.1.0"
