"""Networks as files for elsewhere: exported, slimmed, attacked as files, timed."""

__all__ = [
    "bench",
    "export",
    "exported_eval",
    "slim",
]
