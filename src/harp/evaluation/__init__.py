"""Robust accuracy, and the evidence for it."""

__all__ = [
    "accuracy",
    "accuracy_drop",
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
