"""Export a finished network to files. Every file is checked in a fresh process before it is put in place.

`write` makes the files; `verify` is the check, which loads torch only for files that need it.
"""

__all__ = [
    "api",
    "formats",
    "source",
    "write",
]
