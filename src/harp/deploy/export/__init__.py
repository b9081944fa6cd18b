"""Export a finished network to files. Every file is checked in a fresh process before it is put in place.

`source` is what is exported, `formats` and `codings` say how it is written, and `write` writes and checks the files.
"""

__all__ = [
    "api",
    "formats",
    "source",
    "write",
]
