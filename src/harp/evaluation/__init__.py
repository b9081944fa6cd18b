"""Robust accuracy, and the evidence for it."""

__all__ = [
    "accuracy",
    "chance_level",
    "confidence",
    "consistency",
    "corruptions",
    "model_checks",
    "predict",
    "results",
    "runner",
    "score",
]
