"""Networks as files for elsewhere: exported, slimmed, attacked as files, timed, shared.

`runtimes` opens a file in the runtimes that read it, here or in a fresh process (`fresh_process`).
"""

__all__ = [
    "bench",
    "export",
    "exported_eval",
    "fresh_process",
    "runtimes",
    "sharing",
    "slim",
]
